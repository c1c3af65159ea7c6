"""Decode over 8-bit keys that are read two at a time, against float32: every form of pool and step."""

# ruff: noqa: ANN001, ANN202, RUF100  (inside a kernel, annotations mean constexpr to Triton)

import dataclasses

import pytest
import torch
import triton
import triton.language as tl

from anyattn.kernels.triton import decode_launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant, pairs
from anyattn.kernels.triton.configs import Decode
from anyattn.kernels.triton.decode_pairs import halves
from anyattn.kernels.triton.launch import set_hook

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TILES = Decode(16, 4, 1, 3, 1, True, half=True)


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step; `cut`: ranges over all requests, parts of each, or neither."""

    dtype: torch.dtype = E4M3
    lengths: tuple[int, ...] = (50, 0, 7, 33)
    heads: Heads = Heads(4, 2, 64, 64)  # noqa: RUF009
    page: int = 16
    layout: str = "NHD"
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    scales: tuple[float, ...] = (1.0,)
    tiles: Decode = TILES
    mapped: bool = False
    size: float = 3.0


def decoded(step: Step) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of the kernel, and of float32. Slots that no request owns hold NaN."""
    torch.manual_seed(0)
    heads, page, batch = step.heads, step.page, len(step.lengths)
    per = max(step.lengths) // page + 1
    pages = 1 + batch * per
    every = torch.arange(batch * per * page).view(batch * per, page) + page
    table = every[torch.randperm(batch * per)].view(batch, -1)
    pools = []
    for dim in (heads.dim, heads.v_dim):
        pool = torch.randn(pages * page, heads.num_kv, dim).to(step.dtype)
        owned = torch.zeros(pages * page, dtype=torch.bool)
        for row, length in zip(table, step.lengths, strict=True):
            owned[row[:length]] = True
        pool.view(torch.uint8)[~owned] = 0x7F
        pools.append(pool.view(pages, page, heads.num_kv, dim))
    kept = pools if step.layout == "NHD" else [pool.transpose(1, 2).contiguous() for pool in pools]
    scale = torch.tensor(step.scales)
    q = torch.randn(batch, heads.num_q, heads.dim, dtype=torch.bfloat16) * step.size
    scale_q = heads.dim**-0.5 * 3 / max(step.size, 1e-9)
    out, lse = torch.full((batch, heads.num_q, heads.v_dim), torch.nan), torch.zeros(batch, heads.num_q)
    lens = torch.tensor(step.lengths, dtype=torch.int32)
    sinks = torch.randn(heads.num_q) if step.sinks else None
    slot_map = None
    listed = table
    if step.mapped:
        slot_map = torch.randperm(pages * page, dtype=torch.int32)
        listed = torch.argsort(slot_map)[table]
    cache = Cache.of(kept[0], kept[1], step.layout, scale, 2 * scale, True, slot_map, 1 if step.mapped else 0)
    made = decode_launch.DecodeStep.of(
        listed.int(), torch.arange(batch), lens * 0, lens, step.window, 1 if step.mapped else page, heads,
        step.tiles,
    )  # fmt: skip
    decode_launch.fill_ranges(made)
    variant = Variant(scale_q, step.cap, step.window, sinks)
    decode_launch.decode(q, cache, made, heads, variant, out, lse)
    wanted, wanted_lse = torch.zeros_like(out), torch.zeros_like(lse)
    per_head = scale.repeat_interleave(heads.num_q // len(scale))
    for i, length in enumerate(step.lengths):
        slots = table[i, max(0, length - (step.window or length)) : length]
        k, v = (pool.flatten(0, 1)[slots].float().repeat_interleave(heads.group, 1) for pool in pools)
        logits = torch.einsum("hd,nhd->hn", q[i].float(), k) * scale_q * per_head[:, None]
        logits = logits if step.cap is None else step.cap * torch.tanh(logits / step.cap)
        if sinks is not None:
            logits = torch.cat([logits, sinks[:, None]], 1)
        wanted_lse[i] = torch.logsumexp(logits, 1)
        weights = torch.softmax(logits, 1)[:, : len(slots)]
        wanted[i] = torch.einsum("hn,nhd->hd", weights, v) * 2 * per_head[:, None]
    return out, lse, wanted, wanted_lse


def judged(step: Step) -> None:
    seen = []
    previous = set_hook(lambda kernel, grid, args, constexprs, options: bool(seen.append(constexprs)))
    try:
        out, lse, wanted, wanted_lse = decoded(step)
    finally:
        set_hook(previous)
    assert any(constexprs.get("PAIRS") for constexprs in seen)
    assert torch.allclose(lse, wanted_lse, atol=4e-3)
    assert torch.allclose(out, wanted, atol=4e-3 * max(1.0, float(wanted.abs().max())))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128), (32, 64)])
def test_head_sizes(dims: tuple[int, int], dtype: torch.dtype) -> None:
    judged(Step(dtype=dtype, heads=Heads(4, 2, *dims)))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [1, 16, 64])
def test_pools(page: int, layout: str, dtype: torch.dtype) -> None:
    judged(Step(dtype=dtype, page=page, layout=layout, scales=(0.5, 2.0)))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    "step",
    [
        Step(window=20),
        Step(sinks=True),
        Step(cap=5.0),
        Step(window=20, sinks=True, cap=5.0, scales=(0.25, 1.5)),
        Step(mapped=True),
        Step(size=3e4),
        Step(size=1e-4, cap=5.0),
        Step(size=0.0),
        Step(heads=Heads(18, 1, 64, 64)),
        Step(lengths=(90, 85), tiles=dataclasses.replace(TILES, num_ranges=4, parts=2)),
        Step(tiles=dataclasses.replace(TILES, num_ranges=4, split=False)),
    ],
    ids=lambda step: f"{step.window}-{step.cap}-{step.size}-{step.tiles.parts}-{step.tiles.split}",
)
def test_steps(step: Step, dtype: torch.dtype) -> None:
    judged(dataclasses.replace(step, dtype=dtype))


@triton.jit
def _halves_kernel(words, low, high, N: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, N)
    element: tl.constexpr = tl.float8e5 if KIND == 5 else tl.float8e4nv
    even, odd = halves(tl.load(words + at), element, 1)
    tl.store(low + at, even)
    tl.store(high + at, odd)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_every_pair_of_bytes(dtype: torch.dtype) -> None:
    """All 65,536 words, subnormal numbers, infinities and NaN too, bit for bit."""
    words = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    low, high = (torch.zeros(1 << 16, dtype=torch.float16) for _ in range(2))
    _halves_kernel[(1,)](words, low, high, 1 << 16, 5 if dtype is E5M2 else 4)
    wanted = words.view(dtype).to(torch.float16).view(-1, 2)
    for got, column in ((low, 0), (high, 1)):
        same = got.view(torch.int16) == wanted[:, column].contiguous().view(torch.int16)
        assert bool((same | (got.isnan() & wanted[:, column].isnan())).all())


def test_what_is_not_read_in_pairs() -> None:
    """Rows that begin or end in the middle of a word, other kinds of 8 bits, small heads."""
    one = torch.ones(1)

    def form(k: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> int:
        return pairs(Cache.of(k, k, "NHD", one, one, True), Heads(4, 2, k.shape[3], k.shape[3]), dtype)

    assert form(torch.zeros(2, 16, 2, 64, dtype=E4M3)) == 1
    assert form(torch.zeros(2, 16, 2, 64, dtype=E4M3), torch.float32) == 0
    assert form(torch.zeros(2, 16, 2, 64, dtype=torch.float8_e4m3fnuz)) == 0
    assert form(torch.zeros(2, 16, 2, 64, dtype=torch.float16)) == 0
    assert form(torch.zeros(2, 16, 2, 16, dtype=E4M3)) == 0
    assert form(torch.zeros(2, 16, 2, 63, dtype=E4M3)) == 0
    assert form(torch.zeros(2, 16, 2, 65, dtype=E4M3)[..., :64]) == 0
    assert form(torch.zeros(2 * 16 * 2 * 64 + 1, dtype=E4M3)[1:].view(2, 16, 2, 64)) == 0
