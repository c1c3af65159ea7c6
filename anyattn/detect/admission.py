"""What a plugin's record must be before anything else of the plugin is imported."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from anyattn.core.capabilities import CONTRACT_VERSION, BackendRecord, CapabilityRow, Fault
from anyattn.core.platform_record import PlatformRecord
from anyattn.errors import nearest

__all__ = ["Refused", "backend_fault", "check_name", "platform_fault", "records_of"]


class Refused(Exception):
    """A plugin that can't be used; never leaves `anyattn.detect.plugins`."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(str(fault))
        self.fault = fault


def records_of(point: EntryPoint, distribution: str) -> tuple[Any, ...]:
    """The records behind an entry point. Raises `Refused` for whatever loading them raises."""
    try:
        value = point.load()
        if callable(value) and not isinstance(value, type):
            value = value()
    except (Exception, SystemExit) as error:  # a plugin may raise anything
        found = f"{type(error).__name__}: {' '.join(str(error).split())}{_where(error)}"
        remedy = _gone(error, point, distribution) or (
            f"pip install --force-reinstall {distribution}, or report it to its authors"
        )
        raise Refused(Fault(found, f"{point.value}, importable", remedy)) from error
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(value)
    return (value,)


def _gone(error: BaseException, point: EntryPoint, distribution: str) -> str:
    """The remedy where the plugin's own package isn't there any more: metadata outlives a renamed folder."""
    package = point.value.partition(":")[0].partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != package or point.dist is None:
        return ""
    again = f"pip install --force-reinstall {distribution}"
    if point.dist.read_text("METADATA") is None and point.dist.read_text("PKG-INFO") is not None:
        folder = point.dist.locate_file("")
        return f"{again}; if it was renamed or removed, delete its .egg-info in {folder}"
    return f"{again}; if it was renamed, pip uninstall {distribution}"


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "importlib" not in f.filename and not f.filename.endswith("admission.py")]
    return f" ({own[-1].filename.rpartition('/')[2]}, line {own[-1].lineno})" if own else ""


def check_name(record: Any, point: EntryPoint) -> None:
    """Raises `Refused` where an entry point's one record has another name: reports would mislead."""
    name = getattr(record, "name", point.name)
    if name != point.name:
        raise _wrong(f"entry point {point.name!r} gives {name!r}", "one name for both", point)


def platform_fault(record: Any, point: EntryPoint, *, own: bool) -> None:
    """Raises `Refused` with what is wrong with a platform's record."""
    _check_type(record, PlatformRecord, point)
    _check_contract(record, point, own=own)
    if not re.fullmatch(r"[a-z][a-z0-9]*", record.name):
        raise _wrong(f"the platform name {record.name!r}", "lower-case letters and digits", point)
    if not own and not record.hosts:
        raise _wrong("a platform without hosts", "hosts={'arch': SimulatedHost(...)} for every chip", point)
    for text, what in ((record.detect, "detect"), (record.graph, "graph")):
        if text and text.count(":") != 1:
            raise _wrong(f"{what}={text!r}", "'module:name'", point)
    for entry in record.preferences if not own else ():
        for architecture in entry.architectures:
            if architecture not in record.targets:
                raise _wrong(
                    f"a preference for {architecture}", f"its own chips: {', '.join(record.targets)}", point
                )


def backend_fault(
    record: Any, point: EntryPoint, targets: Sequence[str], platforms: Sequence[str], *, own: bool
) -> None:
    """Raises `Refused` with what is wrong with a backend's record: contract first, then what it says.

    `targets`: every `platform:arch` that is known. Chips are named exactly: a family, or a chip that nobody
    could detect, would be a row that never serves or serves what it wasn't made for.
    """
    _check_type(record, BackendRecord, point)
    _check_contract(record, point, own=own)
    if own:
        return
    if not record.rows or not record.targets:
        what = "rows" if not record.rows else "targets"
        raise _wrong(f"a record without {what}", "what it can do, and the class that does it", point)
    for row in record.rows:
        if not isinstance(row, CapabilityRow):
            raise _wrong(f"a row of type {type(row).__name__}", "CapabilityRow", point)
        for architecture in row.architectures:
            _check_architecture(architecture, point, targets, platforms)


def _check_architecture(
    architecture: str, point: EntryPoint, targets: Sequence[str], platforms: Sequence[str]
) -> None:
    if architecture in targets:
        return
    platform, _, arch = architecture.partition(":")
    if platform not in platforms:
        remedy = f"install or mend the plugin of platform {platform!r}"
        raise Refused(Fault(f"rows for {architecture}", f"platforms: {', '.join(platforms)}", remedy))
    chips = [t for t in targets if t.startswith(f"{platform}:")]
    guess = None if arch == "*" else nearest(architecture, chips)
    remedy = f"did its authors mean {guess!r}?" if guess else "name each chip in the record's rows"
    raise Refused(Fault(f"rows for {architecture}", f"exact chips: {', '.join(chips)}", remedy))


def _check_type(record: Any, kind: type, point: EntryPoint) -> None:
    if not isinstance(record, kind):
        raise _wrong(f"{point.value} is of type {type(record).__name__}", kind.__name__, point)


def _check_contract(record: Any, point: EntryPoint, *, own: bool) -> None:
    """A record says which contract it was written for: the default would always be the installed one."""
    if own or record.contract == CONTRACT_VERSION:
        return
    if record.contract is None:
        wanted = f"contract={CONTRACT_VERSION}, as a number"
        raise _wrong("a record without a contract version", wanted, point)
    newer = isinstance(record.contract, int) and record.contract > CONTRACT_VERSION
    package = "anyattn" if newer else point.dist.name if point.dist else point.name
    raise Refused(
        Fault(
            f"written for contract {record.contract}",
            f"contract {CONTRACT_VERSION}",
            f"pip install --upgrade {package}, so that the two belong together",
        )
    )


def _wrong(found: str, allowed: str, point: EntryPoint) -> Refused:
    package = point.dist.name if point.dist else point.name
    return Refused(Fault(found, allowed, f"pip install --upgrade {package}, or report it to its authors"))
