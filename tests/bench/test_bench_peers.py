"""Peers' calls on stand-ins of their libraries: each gives what float32 gives, on the pages that it likes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from anyattn import api
from anyattn.bench import peers_flash, peers_flashinfer, peers_mla
from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender
from anyattn.bench.judge import bound_of, relative_error
from anyattn.bench.ours import _prepare
from anyattn.bench.peers import peers_of
from anyattn.bench.scene import Field
from anyattn.testing.emulators import emulating

CPU, HOST = torch.device("cpu"), "cuda:sm90"


def dense(step: str, prefixes: tuple[int, ...], news: tuple[int, ...], **fields: object) -> Cell:
    shape = {"num_q": 4, "num_kv": 2, "dim": 64, "v_dim": 64, "modes": ("graph", "eager")} | fields
    return Cell("test", step, prefixes, news, **shape)  # type: ignore[arg-type]


CELLS = {
    "ragged decode": dense("decode", (40, 7, 130), (1, 1, 1)),
    "decode in a window": dense("decode", (40, 40), (1, 1), window=16),
    "prefill": dense("extend", (0, 0), (20, 33)),
    "extend": dense("extend", (17, 50), (5, 9)),
    "mixed": dense("mixed", (17, 50, 9), (12, 1, 1)),
    "verify": dense("verify", (17, 50), (4, 4)),
    "fp8 decode": dense("decode", (40, 7), (1, 1), kv_dtype="float8_e4m3fn"),
    "prefill in a window": dense("extend", (0, 0), (40, 33), window=16),
}
LATENT = Cell("mla", "decode", (70, 130), (1, 1), num_q=16, num_kv=1, dim=576, v_dim=512, page=64)


def judged(contender: Contender, cell: Cell) -> None:
    field = Field(cell, CPU, 2, HOST)
    entrant = contender.prepare(field)
    assert len(entrant.runs) == 2
    assert relative_error(entrant.runs[0](), field.q, entrant.scene) < bound_of(cell), contender.name
    other = entrant.runs[1]()
    assert relative_error(other, field.q, entrant.scene) > 0.5, "the second copy has KV of its own"


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize(
    ("library", "make"), [("fa3", peers_flash.contenders), ("flashinfer", peers_flashinfer.contenders)]
)
def test_dense_peers(name: str, library: str, make: Callable[[Cell], list[Contender]]) -> None:
    cell = CELLS[name]
    with emulating(library, HOST):
        contenders = make(cell)
        assert contenders
        for contender in contenders:
            judged(contender, cell)
        judged(Contender(library, "backend", partial(_prepare, library)), cell)


def test_names_are_unique_in_a_mode() -> None:
    ours = api.registry().names()
    for cell in (*CELLS.values(), LATENT):
        dense_ones = [*peers_flash.contenders(cell), *peers_flashinfer.contenders(cell)]
        latent = [*peers_mla.flashmla(cell), *peers_mla.flashinfer(cell)]
        for mode in ("graph", "eager"):
            names = [c.name for c in (latent if cell.mla else dense_ones) if mode in c.modes]
            assert len({*names, *ours}) == len(names) + len(ours), names


@pytest.mark.parametrize(
    ("library", "make"), [("flashmla", peers_mla.flashmla), ("flashinfer_mla", peers_mla.flashinfer)]
)
def test_latent_peers(library: str, make: Callable[[Cell], list[Contender]]) -> None:
    with emulating(library, HOST):
        for contender in make(LATENT):
            judged(contender, LATENT)
    assert make(CELLS["extend"]) == []


def test_who_is_asked() -> None:
    on_cpu = [c.name for c in peers_of(dense("decode", (8, 8), (1, 1), modes=("eager",)), CPU)]
    assert on_cpu[:2] == ["torch SDPA, gathered", "torch SDPA, contiguous KV"]
    assert [c.counts for c in peers_of(dense("decode", (8, 8), (1, 1), modes=("eager",)), CPU)][:2] == [
        True,
        False,
    ]
    assert not [c for c in peers_of(CELLS["ragged decode"], CPU) if c.name.startswith("torch")]
