"""Decode of requests that are cut, and the merge of their pieces: ranges or equal parts, few or many."""

from typing import Any

import pytest
import torch

from anyattn.kernels.triton import decode_launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs import Decode

HEADS = Heads(12, 2, 16, 16)
PARTS = Decode(16, 4, 1, 6, 2, parts=3)
RANGES = Decode(16, 4, 1, 5, 1)
UNEVEN, EVEN = [300, 16, 0, 130, 5, 97], [150, 33]


class Scene:
    def __init__(
        self, lens: list[int], tiles: Decode, heads: Heads = HEADS, window: int | None = None, **variant: Any
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        torch.manual_seed(3)
        batch, self.heads, self.window = len(lens), heads, window
        pages = batch * 20 + 1
        k, v = (torch.randn(pages, 16, heads.num_kv, heads.dim, generator=generator) for _ in range(2))
        self.k, self.v = k, v
        self.q = torch.randn(batch, heads.num_q, heads.dim, generator=generator)
        one = torch.ones(1)
        self.cache = Cache.of(k, v, "NHD", one, one, False)
        self.table = torch.arange(16, pages * 16, dtype=torch.int32).view(batch, 320)
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.variant = Variant(0.25, window=window, **variant)
        self.tiles = tiles

    def step(self) -> decode_launch.DecodeStep:
        rows = torch.arange(len(self.lens))
        step = decode_launch.DecodeStep.of(
            self.table, rows, self.lens * 0, self.lens, self.window, 16, self.heads, self.tiles
        )
        step.ranges.fill_(-7)
        decode_launch.fill_ranges(step)
        return step

    def run(self, step: decode_launch.DecodeStep) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full_like(self.q, -9.0), torch.full(self.q.shape[:2], -9.0)
        assert step.pieces is not None
        for piece in step.pieces:
            piece.fill_(torch.nan)
        decode_launch.decode(self.q, self.cache, step, self.heads, self.variant, out, lse)
        return out, lse

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`[B, Hq, D]` and `[B, Hq]`; zeros and -inf, or the sinks, for requests without keys."""
        out = torch.zeros_like(self.q)
        lse = torch.full(self.q.shape[:2], -torch.inf)
        if self.variant.sinks is not None:
            lse[:] = self.variant.sinks
        for b, length in enumerate(self.lens.tolist()):
            if length:
                keys, values = (
                    x.flatten(0, 1)[self.table[b, :length].long()].repeat_interleave(self.heads.group, 1)
                    for x in (self.k, self.v)
                )
                logits = torch.einsum("hd,nhd->hn", self.q[b], keys) * 0.25
                if self.window is not None:
                    logits[:, : max(0, length - self.window)] = -torch.inf
                if self.variant.sinks is not None:
                    logits = torch.cat([logits, self.variant.sinks[:, None]], 1)
                weights = torch.softmax(logits, -1)[:, :length]
                out[b] = torch.einsum("hn,nhd->hd", weights, values)
                lse[b] = logits.logsumexp(-1)
        return out, lse


def judged(scene: Scene) -> None:
    for ours, wanted in zip(scene.run(scene.step()), scene.reference(), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 12)], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("lens", "tiles", "window"),
    [
        (EVEN, PARTS, None),
        ([290, 280], PARTS, 200),
        (UNEVEN, RANGES, None),
        (UNEVEN, RANGES, 40),
        ([310], Decode(16, 4, 1, 20, 1), None),
        ([310], Decode(16, 4, 1, 20, 1, parts=20), None),
        ([290, 280], Decode(32, 4, 1, 6, 2, parts=3, unit=16), 200),
        ([290, 280], Decode(32, 4, 1, 6, 2, parts=3, alike=True), None),
        ([310, 299], Decode(64, 4, 1, 6, 1, parts=3, unit=16), None),
        (UNEVEN, Decode(32, 4, 1, 7, 1, unit=16), None),
    ],
    ids=[
        "parts",
        "parts-window",
        "ranges",
        "ranges-window",
        "20-ranges",
        "20-parts",
        "half-tiles-window",
        "parts-alike",
        "quarter-tiles",
        "half-tiles-ranges",
    ],
)
def test_pieces_make_a_request(
    lens: list[int], tiles: Decode, window: int | None, sinks: torch.Tensor | None
) -> None:
    judged(Scene(lens, tiles, window=window, sinks=sinks))


def test_head_blocks_and_layers_with_fewer_heads() -> None:
    """Two programs a KV head; then a layer of one, in the same step and in a workspace of its own."""
    wide, narrow = Heads(72, 1, 16, 16), Heads(3, 1, 16, 16)
    scene = Scene(EVEN, PARTS, wide)
    judged(scene)
    step, small = scene.step(), Scene(EVEN, PARTS, narrow)
    out = torch.zeros_like(small.q)
    work = decode_launch.pieces(2, narrow, step.tiles, out.device)
    decode_launch.decode(small.q, small.cache, step, narrow, small.variant, out, None, work)
    torch.testing.assert_close(out, small.reference()[0], atol=1e-5, rtol=1e-5)
