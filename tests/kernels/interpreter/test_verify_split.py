"""A few query tokens a request against cut keys, beside a dense model: each rule of visibility, each cut."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from anyattn.kernels.triton import verify_launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs import Decode
from anyattn.kernels.triton.configs.choose_verify import Verify
from anyattn.kernels.triton.decode_launch import fill_ranges
from anyattn.kernels.triton.verify_launch import ALL_COLUMNS, DRAFTS, NO_MASK, VerifyMasks, VerifyStep

HEADS = Heads(6, 2, 16, 16)
PARTS, WALK = Decode(16, 4, 1, 0, 2, parts=3), Decode(16, 4, 1, 5, 1)
UNEVEN = [(190, 4), (12, 1), (0, 5), (78, 5), (41, 0)]
EVEN = [(150, 5), (140, 3)]
KEPT = 512


class Scene:
    """Requests of `(prefix, new)` tokens in shuffled pages; slots that nobody owns hold NaN."""

    def __init__(
        self, requests: list[tuple[int, int]], keys: Decode, *, heads: Heads = HEADS, page: int = 4,
        layout: str = "NHD", mask: int = NO_MASK, direct: bool = False, mapped: bool = False,
        block_m: int = 16, spare: int = 0, window: int | None = None, scales: bool = False,
        half: bool = False, **variant: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(3)
        self.heads, self.page, self.mask, self.direct, self.window = heads, page, mask, direct, window
        self.requests, batch = requests, len(requests)
        self.prefix, self.new = (
            torch.tensor(each, dtype=torch.int32) for each in zip(*requests, strict=True)
        )
        self.seq = self.prefix + self.new
        self.offsets = torch.cat([torch.zeros(1), self.new.cumsum(0)]).int()
        self.tokens = int(self.offsets[-1]) + 3
        used = -(-self.seq // page)
        order = torch.randperm(int(used.sum())) + 1
        self.table = torch.zeros(batch + 1, KEPT, dtype=torch.int32)
        self.rows = torch.arange(batch, 0, -1)
        slots = int(used.sum() + 1) * page
        k, v = (torch.full((slots, heads.num_kv, d), torch.nan) for d in (heads.dim, heads.v_dim))
        at = 0
        for b in range(batch):
            own = (order[at : at + int(used[b])][:, None] * page + torch.arange(page)).flatten()
            at += int(used[b])
            self.table[self.rows[b], : self.seq[b]] = own[: self.seq[b]].int()
            kept = own[: self.prefix[b] if direct else self.seq[b]]
            k[kept] = torch.randn(len(kept), heads.num_kv, heads.dim)
            v[kept] = torch.randn(len(kept), heads.num_kv, heads.v_dim)
        self.k, self.v = k, v
        self.slot_map = torch.randperm(slots).int() if mapped and page == 1 else None
        self.q = torch.randn(self.tokens, heads.num_q, heads.dim)
        self.k_new = torch.randn(self.tokens, heads.num_kv, heads.dim)
        self.v_new = torch.randn(self.tokens, heads.num_kv, heads.v_dim)
        self.k_scale, self.v_scale = (
            (torch.linspace(0.5, 1.5, heads.num_kv), torch.linspace(2, 3, heads.num_kv))
            if scales
            else (torch.ones(1), torch.ones(1))
        )
        stored_k, stored_v = k, v
        if self.slot_map is not None:
            stored_k, stored_v = torch.empty_like(k), torch.empty_like(v)
            stored_k[self.slot_map.long()], stored_v[self.slot_map.long()] = k, v
        paged = [x.view(-1, page, heads.num_kv, x.shape[-1]) for x in (stored_k, stored_v)]
        if layout == "HND":
            paged = [x.transpose(1, 2).contiguous() for x in paged]
        self.cache = Cache.of(*paged, layout, self.k_scale, self.v_scale, scales, self.slot_map)
        self.variant = Variant(0.25, window=window, **variant)
        self.depth = torch.zeros(self.tokens, dtype=torch.int64)
        cells, sizes = [], [0]
        for p, n in requests:
            tree = torch.rand(n, n).tril() > 0.4
            tree |= torch.eye(n, dtype=torch.bool)
            old = torch.ones(n, p, dtype=torch.bool) if mask == DRAFTS else torch.rand(n, p) > 0.3
            cells.append(torch.cat([old, tree], 1))
            sizes.append(sizes[-1] + cells[-1].numel())
        self.cells, self.sizes = cells, torch.tensor(sizes)
        self.positions = torch.zeros(self.tokens, dtype=torch.int64)
        for b, (p, n) in enumerate(requests):
            first = int(self.offsets[b])
            self.positions[first : first + n] = p + (torch.arange(n) + 1) // (2 if mask else 1)
        most = int(self.new.max()) + spare
        parts = keys.parts or 0
        keys = replace(keys, num_ranges=batch * parts) if parts else keys
        blocks = -(-most * heads.group // block_m)
        self.tiles = Verify(block_m, blocks, most, keys, half)

        if half:  # which stands in for fp8, whose elementwise operations the interpreter gets wrong
            self.q = self.q.half().float()
            self.k, self.v = self.k.half().float(), self.v.half().float()
            self.k_new, self.v_new = self.k_new.half().float(), self.v_new.half().float()
            paged = [x.view(-1, page, heads.num_kv, x.shape[-1]).half() for x in (self.k, self.v)]
            self.cache = Cache.of(*paged, "NHD", self.k_scale, self.v_scale, scales)

    def step(self) -> VerifyStep:
        start = torch.zeros_like(self.prefix)
        if self.window is not None:
            start = (self.prefix - self.window + 1).clamp_min(0)
            start -= start % self.page
        masks = VerifyMasks()
        if self.mask:
            cells = torch.cat([each.flatten() for each in self.cells])
            masks = VerifyMasks(self.mask, cells, self.sizes, self.positions)
        step = VerifyStep.of(
            self.table, self.rows, start, self.seq - start, self.offsets, self.prefix, self.page, self.heads,
            self.tiles, masks,
        )  # fmt: skip
        step.dealt.ranges.fill_(-7)
        fill_ranges(step.dealt)
        return step

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        step = self.step()
        out = torch.full((self.tokens, self.heads.num_q, self.heads.v_dim), -9.0)
        lse = torch.full((self.tokens, self.heads.num_q), -9.0)
        assert step.dealt.pieces is not None
        for piece in step.dealt.pieces:
            piece.fill_(torch.nan)
        q, *given = (x.half() if self.tiles.half else x for x in (self.q, self.k_new, self.v_new))
        given = given if self.direct else [None, None]
        verify_launch.verify(q, *given, self.cache, step, self.variant, out, lse)
        return out, lse

    def visible(self, b: int) -> torch.Tensor:
        p, n = self.requests[b]
        column, token = torch.arange(p + n), torch.arange(n)[:, None]
        seen = self.cells[b] if self.mask else column[None] <= p + token
        if self.window is not None:
            own = self.positions[int(self.offsets[b]) :][:n]
            k_pos = torch.cat([torch.arange(p), own if self.mask else p + torch.arange(n)])
            q_pos = own if self.mask else p + torch.arange(n)
            seen = seen & (q_pos[:, None] - k_pos[None] < self.window)
        return seen

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As `run`; -9 in rows of nobody."""
        out = torch.full((self.tokens, self.heads.num_q, self.heads.v_dim), -9.0)
        lse = torch.full((self.tokens, self.heads.num_q), -9.0)
        group, cap, sinks = self.heads.group, self.variant.cap, self.variant.sinks
        for b, (p, n) in enumerate(self.requests):
            first = int(self.offsets[b])
            if not n:
                continue
            own = self.table[self.rows[b], : p + n].long()
            keys, values = self.k[own] * self.k_scale[:, None], self.v[own] * self.v_scale[:, None]
            if self.direct:
                keys[p:], values[p:] = self.k_new[first : first + n], self.v_new[first : first + n]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            logits = torch.einsum("thd,nhd->htn", self.q[first : first + n], keys) * self.variant.scale
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            logits = logits.masked_fill(~self.visible(b), -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks[:, None, None].expand(-1, n, 1)], 2)
            lse[first : first + n] = torch.logsumexp(logits, -1).T
            weights = torch.softmax(logits, -1)[..., : p + n]
            out[first : first + n] = torch.einsum("htn,nhd->thd", weights, values)
        return out, lse


def judged(scene: Scene, tolerance: float = 2e-5) -> None:
    for ours, wanted in zip(scene.run(), scene.reference(), strict=True):
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=tolerance)


HALVES = Decode(32, 4, 1, 0, 1, parts=3, unit=16)
CUTS = [
    (EVEN, PARTS), (UNEVEN, PARTS), (UNEVEN, WALK), ([(250, 5)], Decode(16, 4, 1, 20, 1)), (UNEVEN, HALVES),
]  # fmt: skip


@pytest.mark.parametrize("direct", [False, True], ids=["pool", "direct"])
@pytest.mark.parametrize("mask", [NO_MASK, ALL_COLUMNS, DRAFTS], ids=["chain", "mask", "drafts"])
@pytest.mark.parametrize(("requests", "keys"), CUTS)
def test_who_sees_what(requests: list[tuple[int, int]], keys: Decode, mask: int, direct: bool) -> None:
    judged(Scene(requests, keys, mask=mask, direct=direct, scales=direct))


@pytest.mark.parametrize("direct", [False, True], ids=["pool", "direct"])
@pytest.mark.parametrize("mask", [NO_MASK, ALL_COLUMNS, DRAFTS], ids=["chain", "mask", "drafts"])
@pytest.mark.parametrize("window", [3, 40])
@pytest.mark.parametrize("keys", [PARTS, WALK])
def test_windows(window: int, keys: Decode, mask: int, direct: bool) -> None:
    judged(Scene(UNEVEN, keys, window=window, mask=mask, direct=direct))


@pytest.mark.parametrize(
    "asked",
    [
        {"cap": 3.0, "sinks": torch.linspace(-1, 2, 6)},
        {"page": 1, "mapped": True},
        {"page": 16, "layout": "HND", "scales": True},
        {"heads": Heads(7, 1, 16, 32)},
        {"heads": Heads(40, 2, 24, 16), "block_m": 32},
        {"heads": Heads(20, 1, 16, 16), "spare": 3},
        {"spare": 20},
    ],
    ids=["cap and sinks", "slot map", "HND", "group of 7", "blocks of rows", "wide group", "fewer tokens"],
)
@pytest.mark.parametrize("keys", [PARTS, WALK])
def test_layers(keys: Decode, asked: dict[str, Any]) -> None:
    judged(Scene(UNEVEN, keys, **asked))


@pytest.mark.parametrize("size", [1.0, 3000.0])
@pytest.mark.parametrize("direct", [False, True], ids=["pool", "direct"])
def test_queries_of_any_size_in_half_precision(direct: bool, size: float) -> None:
    scene = Scene(EVEN, WALK, direct=direct, half=True, scales=True)
    scene.q = (scene.q * size).half().float()
    scene.variant = Variant(0.25 / size)
    judged(scene, 5e-3)


def test_a_long_turn_in_blocks_of_rows() -> None:
    judged(Scene([(70, 18), (9, 7)], WALK, direct=True))
    judged(Scene([(70, 18), (9, 7)], PARTS))


def test_a_sink_counts_once_where_nothing_is_cut() -> None:
    for keys, direct in itertools.product((PARTS, WALK), (False, True)):
        judged(Scene([(5, 3), (0, 1)], keys, direct=direct, sinks=torch.linspace(-1, 2, 6)))
