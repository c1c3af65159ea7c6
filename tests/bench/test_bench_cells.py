"""Cells and the grid: what a call moves and computes, names, JSON, choosing, mistakes in a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from anyattn.bench.cells import Cell
from anyattn.bench.grid import choose, load_grid
from anyattn.core.capabilities import Phase
from anyattn.errors import ConfigError, UnknownNameError

DECODE = Cell("decode", "decode", (8191,) * 4, (1,) * 4)


def brute_pairs(prefix: int, new: int, window: int | None) -> int:
    return sum(min(p + 1, window or p + 1) for p in range(prefix, prefix + new))


@pytest.mark.parametrize("window", [None, 1, 7, 20, 100])
@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 33), (19, 5), (50, 1), (5, 40)])
def test_operations_count_visible_pairs(prefix: int, new: int, window: int | None) -> None:
    cell = Cell("x", "extend", (prefix, 3), (new, 2), num_q=4, num_kv=2, dim=8, v_dim=8, window=window)
    pairs = brute_pairs(prefix, new, window) + brute_pairs(3, 2, window)
    assert cell.work().flops == 4 * 4 * 8 * pairs


def test_bytes_are_those_that_are_seen() -> None:
    assert DECODE.kv_bytes == 4 * 8192 * 8 * 256 * 2 == DECODE.stored_bytes
    seen = replace(DECODE, window=1024)
    assert seen.kv_bytes == 4 * 1024 * 8 * 256 * 2
    assert seen.stored_bytes == DECODE.stored_bytes
    latent = Cell("mla", "decode", (63,), (1,), num_q=16, num_kv=1, dim=576, v_dim=512, page=64)
    assert latent.mla
    assert latent.kv_bytes == 64 * 576 * 2
    assert latent.work().flops == 2 * 16 * (576 + 512) * 64


def test_names_and_json() -> None:
    assert DECODE.name == "decode-4x8k-32/8-d128-p16"
    ragged = Cell("chat", "extend", (5, 0), (3, 7), kv_dtype="float8_e4m3fn", window=9, weight=2.5)
    assert ragged.name == "chat-2x~2+5-32/8-d128-p16-w9-e4m3fn"
    data = ragged.to_json()
    assert data["lengths"] == [[5, 3], [0, 7]]
    assert Cell.from_json(data) == ragged
    assert Cell.from_json(data).weight == 2.5
    assert Cell.from_json(DECODE.to_json()) == DECODE
    assert DECODE.phase is Phase.DECODE
    assert ragged.phase is Phase.PREFILL


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_shipped_grid(kind: str) -> None:
    cells = load_grid(kind)
    assert len({cell.name for cell in cells}) == len(cells)
    assert [cell.worth for cell in cells] == sorted(cell.worth for cell in cells)
    assert all(Cell.from_json(cell.to_json()) == cell for cell in cells)
    assert load_grid(kind) == cells, "the same in every run"


def test_shipped_grid_covers_what_it_must() -> None:
    cells = load_grid("gpu")
    workloads = {"decode", "prefill", "extend", "mixed", "verify", "mla_decode", "window", "fp8", "chat"}
    assert {cell.workload for cell in cells} == workloads
    heads = {(cell.num_q, cell.num_kv) for cell in cells}
    assert {(32, 8), (64, 8), (28, 4), (16, 2), (8, 1), (32, 32)} <= heads
    assert {64, 128, 256} <= {cell.dim for cell in cells}
    assert {1, 16, 64} <= {cell.page for cell in cells}
    decode = [cell for cell in cells if cell.workload == "decode"]
    assert {1, 512} <= {cell.batch for cell in decode}
    assert {128, 131072} <= {cell.lengths[0] for cell in decode}
    assert {cell.workload for cell in cells if cell.quick} == workloads - {"chat"}


def test_choosing() -> None:
    cells = load_grid("gpu")
    assert {c.workload for c in choose(cells, workloads=["fp8", "window"])} == {"fp8", "window"}
    assert [c.name for c in choose(cells, patterns=["decode-64x8k-32/8*p16"])] == [
        "decode-64x8k-32/8-d128-p16"
    ]
    assert all(c.quick for c in choose(cells, quick=True))
    assert all("graph" in c.modes for c in choose(cells, modes=["graph"]))
    with pytest.raises(UnknownNameError, match="decode"):
        choose(cells, workloads=["decod"])
    with pytest.raises(UnknownNameError, match="cell"):
        choose(cells, patterns=["decode-65*"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[gpu.decode]\ncells = [{ batch = 1 }]", "context"),
        ("[gpu.decode]\ncells = [{ batch = 1, contxt = 5 }]", "contxt"),
        ("[gpu.decode]\nmodes = ['graphs']\ncells = []", "graphs"),
        ("[gpu.decode]\ncells = [{ batch = 2, ragged = 'uniform 3' }]", "uniform LOW HIGH"),
        ("[gpu.chat]\nday = { rat = 3 }", "rat"),
        ("[gpu.decode", "TOML"),
        ("[tpu.decode]", "gpu"),
    ],
)
def test_mistakes_in_a_grid(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    with pytest.raises((ConfigError, UnknownNameError), match=error):
        load_grid("gpu", path)


def test_a_grid_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        load_grid("gpu", tmp_path / "none.toml")
