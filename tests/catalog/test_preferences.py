"""Preference lists: known names, exact chips, dated evidence, a list for every chip."""

from __future__ import annotations

from datetime import date
from itertools import product

import pytest

from anyattn.catalog import architectures, records
from anyattn.core.capabilities import ModelKind, Phase, Preference
from anyattn.detect.simulated import HOSTS
from anyattn.errors import UnknownNameError
from anyattn.platforms import PLATFORMS, preferences

ALL = [entry for platform in PLATFORMS for entry in preferences(platform)]
RECORDS = {record.name: record for record in records()}


def test_platforms_are_those_of_the_hosts() -> None:
    assert set(PLATFORMS) == {host.partition(":")[0] for host in HOSTS}


def test_unknown_platform_is_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'cuda'"):
        preferences("cudaa")


@pytest.mark.parametrize("entry", ALL, ids=lambda e: f"{e.architectures[0]}-{e.kind.value}-{e.phase.value}")
def test_entry_is_well_formed(entry: Preference) -> None:
    assert set(entry.architectures) <= set(architectures.KNOWN)
    assert len(set(entry.order)) == len(entry.order) > 0
    assert date.fromisoformat(entry.date) >= date(2025, 1, 1)
    assert len(entry.evidence) > 20
    assert ("not measured" in entry.evidence) or any(c.isdigit() for c in entry.evidence)
    for name in entry.order:
        assert entry.kind in RECORDS[name].row_kinds(), name


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.DECODE])
def test_each_chip_has_one_dense_list_a_phase(host: str, phase: Phase) -> None:
    found = [e for e in ALL if host in e.architectures and e.phase is phase and e.kind is ModelKind.DENSE]
    assert len(found) == 1


@pytest.mark.parametrize("host", HOSTS)
def test_lists_name_all_that_have_rows_there(host: str) -> None:
    """A backend that a list forgets would be ranked by registration alone."""
    for kind, phase in product((ModelKind.DENSE, ModelKind.MLA), (Phase.PREFILL, Phase.DECODE)):
        _check_complete(host, kind, phase)


def _check_complete(host: str, kind: ModelKind, phase: Phase) -> None:
    able = {
        r.name
        for r in records()
        if any(host in w.architectures and kind in w.kinds and phase in w.phases for w in r.rows)
    }
    listed = {
        n for e in ALL if host in e.architectures and (e.kind, e.phase) == (kind, phase) for n in e.order
    }
    assert able <= listed


def test_the_reference_is_last_on_accelerators() -> None:
    for entry in ALL:
        if "torch_native" in entry.order and not entry.architectures[0].startswith("cpu:"):
            assert entry.order[-1] == "torch_native"


def test_names_that_cannot_run_on_a_chip_are_not_listed() -> None:
    for entry in ALL:
        for chip in entry.architectures:
            for name in entry.order:
                rows = [r for r in RECORDS[name].rows if entry.kind in r.kinds and entry.phase in r.phases]
                assert any(chip in row.architectures for row in rows), (chip, name, entry.phase)
