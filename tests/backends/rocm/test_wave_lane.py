"""The lane that compiles Wave's templates: what it compiles, and what it reads in a code object."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from anyattn.catalog import records
from anyattn.core.capabilities import Phase

PATH = Path(__file__).resolve().parents[3] / "ci" / "lanes" / "wave_compile.py"


@pytest.fixture(scope="module")
def lane() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wave_compile", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.PREFILL])
def test_each_group_and_head_size_of_the_rows_is_compiled(lane: ModuleType, phase: Phase) -> None:
    (record,) = (record for record in records() if record.name == "wave")
    rows = [row for row in record.rows if phase in row.phases]
    groups, sizes = lane.EXTENDS["groups"], lane.EXTENDS["sizes"]
    shapes = {(heads // own, size) for heads, own, size, *_ in lane.SHAPES}
    if phase is Phase.PREFILL:
        shapes = {(group, size) for group, size in shapes if group in groups and size in sizes}
    for row in rows:
        assert {group for group, _ in shapes} == set(row.group_sizes or ())
        assert {size for _, size in shapes} == {size for size, _ in row.head_dims.pairs}


def test_a_code_object_names_its_chip_and_its_resources(lane: ModuleType) -> None:
    header = bytearray(b"\x7fELF" + bytes(60))
    header[48:52] = (0x54F).to_bytes(4, "little")  # further bits are features of the chip
    notes = b"\xb0.vgpr_count\xcc\xe2" + b".vgpr_spill_count\x00" + b".group_segment_fixed_size\xcd\x25\x00"
    target, counts = lane.described(bytes(header) + notes)
    assert target == "gfx950"
    assert counts == {"VGPRs": 226, "spills": 0, "LDS": 9472}
    header[48] = 0x21
    assert lane.described(bytes(header))[0] == "0x21"
    assert lane.described(b"hsaco") == ("no ELF file", {})
