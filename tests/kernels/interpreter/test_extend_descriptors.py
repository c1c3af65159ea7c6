"""Extend through tensor descriptors, in the interpreter: which steps take it, and that it is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs.choose import Extend
from anyattn.kernels.triton.extend_launch import ExtendStep, extend
from anyattn.kernels.triton.launch import set_hook
from anyattn.kernels.triton.recording import recording_launches
from anyattn.testing.cases import Case
from anyattn.testing.interpreter import offer_triton
from anyattn.testing.judge import check_case

TILES = Extend(32, 16, 4, 1, tma=Extend(32, 16, 4, 1))
POINTERS = replace(TILES, tma=None)
PREFIX, NEW = (0, 37, 16), (40, 23, 1)


@dataclass
class Step:
    """Three requests on pages of `page` slots in reverse order; NaN wherever nobody looks."""

    page: int = 16
    layout: str = "NHD"
    prefix: tuple[int, ...] = PREFIX
    num_q: int = 4
    num_kv: int = 2
    dim: int = 16
    v_dim: int = 32
    mapped: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.lens = [p + n for p, n in zip(self.prefix, NEW, strict=True)]
        tokens, keys = sum(NEW), sum(self.lens)
        self.q = random(tokens, self.num_q, self.dim)
        self.keys, self.values = random(keys, self.num_kv, self.dim), random(keys, self.num_kv, self.v_dim)
        pages = [-(-n // self.page) for n in self.lens]
        order = torch.arange(sum(pages), 0, -1)
        context = max(pages) * self.page
        self.table = torch.zeros(len(NEW), context, dtype=torch.int32)
        shape = (sum(pages) + 1, self.page, self.num_kv)
        k, v = (torch.full((*shape, d), torch.nan) for d in (self.dim, self.v_dim))
        at = first = 0
        for i, n in enumerate(self.lens):
            mine = order[first : first + pages[i]]
            slots = (mine[:, None] * self.page + torch.arange(self.page)).flatten()
            self.table[i, : len(slots)] = slots.int()
            k.view(-1, self.num_kv, self.dim)[slots[:n]] = self.keys[at : at + n]
            v.view(-1, self.num_kv, self.v_dim)[slots[:n]] = self.values[at : at + n]
            at, first = at + n, first + pages[i]
        if self.layout == "HND":
            k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
        one, slot_map = torch.ones(1), None
        if self.mapped:  # the table lists another pool's slots, twice as far away
            slot_map = torch.zeros(2 * self.page * shape[0], dtype=torch.int32)
            here = torch.arange(self.page * shape[0], dtype=torch.int32)
            there = here // self.page * 2 * self.page + here % self.page
            slot_map[there.long()] = here
            self.table = there[self.table.long()]
        self.cache = Cache.of(k, v, self.layout, one, one, False, slot_map, self.page)
        lens = torch.tensor
        self.offsets = lens([0, *torch.tensor(NEW).cumsum(0).tolist()], dtype=torch.int32)
        self.step = ExtendStep(
            source=self.table,
            req_rows=torch.arange(len(NEW)),
            query_offsets=self.offsets,
            prefix_lens=lens(self.prefix, dtype=torch.int32),
            pool_lens=lens(self.lens, dtype=torch.int32),
            kv_start=torch.zeros(len(NEW), dtype=torch.int32),
        )
        self.heads = Heads(self.num_q, self.num_kv, self.dim, self.v_dim)
        self.out, self.lse = torch.zeros(tokens, self.num_q, self.v_dim), torch.zeros(tokens, self.num_q)

    def run(self, variant: Variant, tiles: Extend = TILES, *, anchor: bool = False) -> None:
        """Everything from the pool."""
        extend(
            self.q, None, None, self.cache, self.step, self.heads, variant, tiles, self.out, self.lse,
            anchor=anchor,
        )  # fmt: skip

    def run_new(self, variant: Variant, k: torch.Tensor, v: torch.Tensor) -> None:
        """Without a pool: k and v are all there is."""
        step = replace(self.step, pool_lens=None)
        extend(self.q, k, v, self.cache, step, self.heads, variant, TILES, self.out, self.lse)

    def error(self, variant: Variant) -> float:
        """Largest difference of output and log-sum-exp from plain arithmetic."""
        worst, at = 0.0, 0
        for i, (p, n) in enumerate(zip(self.prefix, NEW, strict=True)):
            k, v = (x[at : at + p + n].double() for x in (self.keys, self.values))
            rows = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
            at += p + n
            q = self.q[rows].double().unflatten(1, (self.num_kv, -1))
            s = torch.einsum("thgd,nhd->thgn", q, k) * variant.scale
            if variant.cap is not None:
                s = variant.cap * torch.tanh(s / variant.cap)
            gap = (p + torch.arange(n))[:, None] - torch.arange(p + n)
            seen = (gap >= 0) & (gap < (variant.window or 1 << 30))
            s = s.masked_fill(~seen[:, None, None], -torch.inf)
            lse = s.logsumexp(-1)
            if variant.sinks is not None:
                lse = torch.logaddexp(lse, variant.sinks.double().view(self.num_kv, -1))
            out = torch.einsum("thgn,nhd->thgd", (s - lse[..., None]).exp(), v)
            worst = max(
                worst,
                float((self.out[rows] - out.flatten(1, 2)).abs().max()),
                float((self.lse[rows] - lse.flatten(1)).abs().max()),
            )
        return worst


@pytest.fixture
def launched() -> Iterator[list[str]]:
    names: list[str] = []
    previous = set_hook(lambda kernel, *_: bool(names.append(kernel.__name__)))
    yield names
    set_hook(previous)


PLAIN = Variant(0.25)
VARIANTS = {
    "plain": PLAIN,
    "cap": Variant(0.25, cap=3.0),
    "sinks": Variant(0.25, sinks=torch.linspace(-2, 2, 4)),
    "window": Variant(0.25, window=9),
    "wide window": Variant(0.25, window=30, cap=5.0, sinks=torch.zeros(4)),
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("page", [16, 64])
def test_pages_of_whole_tiles(page: int, variant: Variant, launched: list[str]) -> None:
    step = Step(page)
    step.run(variant)
    assert launched == ["extend_tma_kernel"]
    assert step.error(variant) < 1e-5


@pytest.mark.parametrize("name", ["plain", "window"])
@pytest.mark.parametrize(
    "case", [{"layout": "HND"}, {"mapped": True}, {"num_kv": 1}, {"num_q": 6, "v_dim": 16}]
)
def test_layouts_maps_and_groups(case: dict[str, object], name: str, launched: list[str]) -> None:
    step = Step(**case)  # type: ignore[arg-type]
    step.run(VARIANTS[name])
    assert launched == ["extend_tma_kernel"]
    assert step.error(VARIANTS[name]) < 1e-5


@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_new_keys_alone(name: str, launched: list[str]) -> None:
    """As parts of one tensor; NaN in the rows behind the last token's."""
    step = Step(prefix=(0, 0, 0))
    rows = torch.full((sum(NEW) + 40, 2, 16 + 32), torch.nan)
    rows[: sum(NEW), :, :16], rows[: sum(NEW), :, 16:] = step.keys, step.values
    step.run_new(VARIANTS[name], rows[:, :, :16], rows[:, :, 16:])
    assert launched == ["extend_tma_kernel"]
    assert step.error(VARIANTS[name]) < 1e-5


def test_what_needs_pointers(launched: list[str]) -> None:
    """The same answer, from the kernel that reads anything."""
    positions = torch.arange(sum(NEW))
    short = Step(page=8)
    short.run(PLAIN)
    assert short.error(PLAIN) < 1e-5
    odd = Step(dim=24, v_dim=48)
    odd.run(PLAIN)
    assert odd.error(PLAIN) < 1e-5
    anchored = Step()
    anchored.run(VARIANTS["window"], anchor=True)
    assert anchored.error(VARIANTS["window"]) < 1e-5
    Step().run(PLAIN, POINTERS)
    both = Step()
    new = torch.zeros(sum(NEW), 2, 16), torch.zeros(sum(NEW), 2, 32)
    extend(both.q, *new, both.cache, both.step, both.heads, PLAIN, TILES, both.out, both.lse)
    placed = Step()
    placed.step = replace(placed.step, positions=positions)
    placed.run(VARIANTS["window"])
    assert set(launched) == {"extend_kernel"}
    assert len(launched) == 6


def test_descriptors_of_a_pool_are_made_once(launched: list[str]) -> None:
    step = Step()
    step.run(PLAIN)
    made = step.cache.memo["matrices"].made
    first = dict(made)
    step.run(VARIANTS["cap"])
    assert first
    assert all(made[key] is value for key, value in first.items())


def test_a_replay_reads_what_lies_there_then() -> None:
    """Descriptors in the recorder: addresses are kept, contents are not."""
    step = Step(prefix=(0, 0, 0))
    graph = RecorderPlatform(poison=True, seams=[recording_launches]).new_graph()
    graph.capture(lambda: step.run_new(PLAIN, step.keys, step.values))
    assert [name for name in graph.operations if "extend" in name] == ["triton kernel extend_tma_kernel"]
    for _ in range(2):
        step.keys.normal_()
        step.values.normal_()
        graph.replay()
        assert step.error(PLAIN) < 1e-5


@pytest.mark.parametrize(("prefix", "kernel"), [((0, 0), "extend_tma_kernel"), ((0, 3), "extend_kernel")])
def test_the_backend_reads_new_keys_where_nothing_is_cached(
    prefix: tuple[int, ...], kernel: str, launched: list[str]
) -> None:
    """Pages of 4 are too short for descriptors: k and v as given aren't."""
    offer_triton()
    case = Case(prefix_lens=prefix, extend_lens=(97, 20), page_size=4, head_dim=16, v_head_dim=16)
    report = check_case(case, backend="triton")
    assert report.passed, str(report)
    assert [name for name in launched if name.startswith("extend")] == [kernel]
