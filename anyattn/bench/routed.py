"""The routed choice in the cells of a saved result: whom `select(route=True)` sends each step to.

Decided for a machine with the result's device and versions, by the table that the result makes and by the
tables that ship, so that it can be told anywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import anyattn
from anyattn import api
from anyattn.bench.cells import Cell
from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.core.measure.from_bench import from_bench
from anyattn.core.measure.rules import RouteMap
from anyattn.core.measure.shipped import tables_for
from anyattn.core.measure.table import MeasuredTable
from anyattn.core.select.decision import Decision
from anyattn.core.select.solve import decide
from anyattn.errors import ConfigError, SelectionError, UnknownNameError

__all__ = ["host_of", "label", "routed", "taker"]

Entry = Mapping[str, Any]
_OWN, _STORED = "the table of this result", "stored tables"
_DRAFTS = 16
_CONTEXT = 1 << 20


def label(entry: Entry) -> str:
    """Name of a cell in one mode."""
    return f"{entry['cell']['name']} {entry['mode']}"


def taker(decision: Decision, cell: Cell, mode: str) -> str:
    """The backend that a decision sends the cell's step to. Raises `SelectionError` where nobody is."""
    route = decision.route(cell.role)
    if route is None:
        return _unrouted(decision, cell, mode)
    return RouteMap(route.members[0].backend, route.rules).backend(mode, *cell.size)


def _unrouted(decision: Decision, cell: Cell, mode: str) -> str:
    """Mixed steps without a backend of their own go where prefill's do."""
    prefill = decision.route(cell.phase)
    if decision.mixed is None and cell.step == "mixed" and prefill is not None:
        return RouteMap(prefill.members[0].backend, prefill.rules).backend(mode, *cell.size)
    return decision.serving(cell.role).backend


def host_of(document: Mapping[str, Any]) -> HostFacts:
    """The machine that a result is of, as far as it says."""
    versions = {str(name): str(version) for name, version in document["versions"].items() if version}
    platform, _, arch = str(document["arch"]).partition(":")
    libraries = {
        name: LibraryFacts(name, version, (), LibraryState.USABLE) for name, version in versions.items()
    }
    return HostFacts(
        platform, arch, device_name=document["device"], num_units=document.get("units"),
        runtime=versions.get("cuda"), torch=versions.get("torch"), libraries=libraries, simulated=True,
    )  # fmt: skip


def routed(document: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By whose table -> cell and mode -> the backend that the routed choice takes there.

    The table that the result itself makes, and those that ship (or `ANYATTN_MEASUREMENTS`) where they are of
    its device. Cells whose taker wasn't timed, or that nobody serves, are left out.
    """
    told = {**document, "versions": {"anyattn": anyattn.__version__} | dict(document["versions"])}
    facts = host_of(told)
    tables: dict[str, Sequence[MeasuredTable]] = {}
    with contextlib.suppress(ConfigError):  # nothing in it compares two backends
        tables[_OWN] = (from_bench(told),)
    stored = tables_for(facts.target)
    if any(table.provenance.device == facts.device_name for table in stored):
        tables[_STORED] = stored
    found = {name: _takers(told, facts, given) for name, given in tables.items()}
    own, others = (found.get(name, {}) for name in (_OWN, _STORED))
    if own == others:
        found = {f"{_OWN}, and by {_STORED} alike": own}
    return {name: takers for name, takers in found.items() if takers}


def _takers(document: Mapping[str, Any], facts: HostFacts, tables: Sequence[MeasuredTable]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in document["cells"]:
        timed = [r["name"] for r in entry["results"] if r["kind"] == "backend"]
        try:
            name = _take(Cell.from_json(entry["cell"]), entry["mode"], facts, tables) if timed else ""
        except (SelectionError, UnknownNameError):
            continue
        if name in timed:
            found[label(entry)] = name
    return found


def _take(cell: Cell, mode: str, facts: HostFacts, tables: Sequence[MeasuredTable]) -> str:
    limits = anyattn.Limits(
        cell.batch, max(1, cell.tokens), _CONTEXT, max_draft_tokens=_DRAFTS if cell.step == "verify" else 0
    )
    request = api.make_request(
        cell.spec(), dtype=cell.dtype, kv_dtype=cell.kv_dtype, device=api.device_type(facts.platform),
        limits=limits, page_size=cell.page, route=True,
    )  # fmt: skip
    preferences = api.platform_preferences(facts.platform)
    return taker(decide(request, facts, api.registry(), preferences, tables=tables), cell, mode)
