"""The routed choice of a saved result, told anywhere: against the best backend and engines' calls."""

from __future__ import annotations

from typing import Any

import pytest

from anyattn.bench.cells import Cell
from anyattn.bench.choice import BEST, choice_lines, misses, routed_choice
from anyattn.bench.document import load, save
from anyattn.bench.peers_flash import SGLANG
from anyattn.bench.routed import host_of, routed
from anyattn.cli.main import main
from anyattn.core.measure.shipped import shipped_tables

OWN = "the table of this result"
CHAT = (((625, 1024), (3362, 1024)), 126, 2500)
LONG = (((4096, 2048),), 63, 4096)


def entry(cell: Cell, mode: str, **microseconds: float) -> dict[str, Any]:
    """A timed cell; `sglang` is its call."""
    results = [
        {"name": SGLANG if name == "sglang" else name, "kind": "peer" if name == "sglang" else "backend",
         "counts": True, "median_s": value * 1e-6, "best_s": value * 1e-6, "spread": 0.01, "rounds": 5,
         "gb_s": 1.0, "tflop_s": 1.0, "of_limit": 0.1, "error": 0.0, "page": cell.page, "layout": "NHD"}
        for name, value in microseconds.items()
    ]  # fmt: skip
    return {
        "cell": cell.to_json(),
        "mode": mode,
        "copies": 1,
        "choice": None,
        "results": results,
        "skipped": [],
    }


def mixed(prompts: tuple[tuple[int, int], ...], decoding: int, length: int) -> Cell:
    prefixes = (*(p for p, _ in prompts), *[length] * decoding)
    return Cell("mixed", "mixed", prefixes, (*(n for _, n in prompts), *[1] * decoding))


def cells() -> list[dict[str, Any]]:
    def same(step: Any, batch: int, prefix: int, new: int) -> Cell:
        return Cell("decode" if step == "decode" else step, step, (prefix,) * batch, (new,) * batch)

    return [
        entry(same("decode", 64, 8191, 1), "graph", triton=490, fa3=520, flashinfer=510, sglang=580),
        entry(same("decode", 1, 8191, 1), "graph", triton=20, fa3=20.2, sglang=22),
        entry(same("extend", 1, 0, 8192), "eager", triton=880, fa3=850, sglang=900),
        entry(same("extend", 1, 1950, 7), "eager", triton=20, fa3=60, sglang=62),
        entry(mixed(*LONG), "eager", triton=590, fa3=625, sglang=640),
        entry(mixed(*CHAT), "eager", triton=685, fa3=545, sglang=547),
        entry(same("verify", 64, 2048, 4), "graph", triton=134, fa3=162, sglang=164),
        entry(same("verify", 1, 8192, 16), "graph", triton=26, fa3=20.6, sglang=20),
    ]  # fmt: skip


def document(found: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A result of the H200 that the shipped table is of."""
    made = shipped_tables("cuda:sm90")[0].provenance
    return {
        "schema": "anyattn.bench/1", "device": made.device, "arch": made.arch, "units": made.units,
        "versions": dict(made.versions), "date": "2026-11-30T03:07Z", "commit": "abc1234",
        "command": "anyattn bench", "threads": 1, "limits": {}, "left_out": [],
        "cells": cells() if found is None else found,
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _no_stored_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_MEASUREMENTS", "none")


def test_every_kind_of_step_is_told() -> None:
    told = document()
    takers = routed(told)[OWN]
    assert list(takers.values()) == ["triton", "triton", "fa3", "triton", "triton", "fa3", "triton", "fa3"]
    spreads = routed_choice(told, takers)
    assert set(spreads) == {"decode, graph", "prefill, eager", "mixed, eager", "verify, graph"}
    assert {spread[BEST].worst for spread in spreads.values()} == {1.0}
    verify = spreads["verify, graph"]["SGLang's default"]
    assert verify.worst == pytest.approx(20 / 20.6)
    assert verify.where == "verify-1x8k+16-32/8-d128-p16 graph"
    assert verify.mean == pytest.approx((20 / 20.6 * 164 / 134) ** 0.5)
    assert misses(told, takers) == []


def test_cells_that_miss_the_best_are_named() -> None:
    """Two steps of one bucket that want different backends: their mean decides, and one of them loses."""
    one = Cell("decode", "decode", (8191,) * 64, (1,) * 64)
    other = Cell("decode", "decode", (8100,) * 60, (1,) * 60)
    told = document([entry(one, "graph", triton=100, fa3=200), entry(other, "graph", triton=110, fa3=100)])
    takers = routed(told)[OWN]
    assert set(takers.values()) == {"triton"}
    spread = routed_choice(told, takers)["decode, graph"][BEST]
    assert spread.worst == pytest.approx(100 / 110)
    assert misses(told, takers) == ["decode-60x8101-32/8-d128-p16 graph: triton, 0.909 of fa3"]
    assert "  below 0.97 of the best backend: decode-60x8101-32/8-d128-p16 graph: triton, 0.909 of fa3" in (
        choice_lines(told)
    )


def test_stored_tables_are_told_beside_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The table of another run of the device: how its choice does in this one."""
    before = tmp_path / "before.json"
    turned = cells()
    for each in turned[-1]["results"]:
        each["median_s"] = 18e-6 if each["name"] == "triton" else 30e-6
    save(document(turned), tmp_path / "old.json")
    assert main(["bench", "--from", str(tmp_path / "old.json"), "--write", str(before), "--defaults"]) == 0
    monkeypatch.setenv("ANYATTN_MEASUREMENTS", str(before))
    told = document()
    assert set(routed(told)) == {OWN, "stored tables"}
    assert misses(told, routed(told)["stored tables"]) == [
        "verify-1x8k+16-32/8-d128-p16 graph: triton, 0.792 of fa3"
    ]
    assert set(routed(document(turned))) == {f"{OWN}, and by stored tables alike"}


@pytest.mark.parametrize("arch", ["cuda:x9", "weird"])
def test_a_result_of_a_machine_that_nobody_serves_says_nothing(arch: str) -> None:
    strange = document() | {"arch": arch}
    assert routed(strange) == {}
    assert choice_lines(strange) == []
    assert host_of(strange).target.startswith(arch)


def test_the_command_prints_it(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    save(document(), path)
    assert load(path)["cells"]
    assert main(["bench", "--from", str(path), "--defaults"]) == 0
    told = capsys.readouterr().out
    assert "Routed choice, by the table of this result" in told
    for phase in ("decode, graph", "prefill, eager", "mixed, eager", "verify, graph"):
        assert told.count(phase) == 2, "policies, and the routed choice"
