"""Decode that merges by itself: the same as with a merge after it, in whichever order programs end."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from anyattn.kernels.triton import decode_launch
from anyattn.kernels.triton.attention import Cache, Heads, Variant
from anyattn.kernels.triton.configs import Decode
from anyattn.kernels.triton.launch import set_hook

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

    def step(self, *, merged: bool) -> decode_launch.DecodeStep:
        rows = torch.arange(len(self.lens))
        tiles = replace(self.tiles, merged=merged)
        step = decode_launch.DecodeStep.of(
            self.table, rows, self.lens * 0, self.lens, self.window, 16, self.heads, tiles
        )
        step.ranges.fill_(-7)
        decode_launch.fill_ranges(step)
        return step

    def run(self, step: decode_launch.DecodeStep) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full_like(self.q, -9.0), torch.full(self.q.shape[:2], -9.0)
        assert step.pieces is not None
        for piece in step.pieces:
            piece.fill_(7.0)
        decode_launch.decode(self.q, self.cache, step, self.heads, self.variant, out, lse)
        return out, lse

    def reference(self) -> torch.Tensor:
        """Rows with keys; `[B, Hq, D]`, zeros elsewhere."""
        out = torch.zeros_like(self.q)
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
        return out


def launched(scene: Scene, step: decode_launch.DecodeStep) -> list[str]:
    seen: list[str] = []
    previous = set_hook(lambda kernel, *_: bool(seen.append(kernel.__name__)))
    try:
        scene.run(step)
    finally:
        set_hook(previous)
    return seen


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 12)], ids=["", "sinks"])
@pytest.mark.parametrize(
    ("lens", "tiles", "window"),
    [
        (EVEN, PARTS, None),
        ([290, 280], PARTS, 200),
        (UNEVEN, RANGES, None),
        (UNEVEN, RANGES, 40),
        ([310], Decode(16, 4, 1, 20, 1), None),
    ],
)
def test_the_same_as_a_merge_after_it(
    lens: list[int], tiles: Decode, window: int | None, sinks: torch.Tensor | None
) -> None:
    scene = Scene(lens, tiles, window=window, sinks=sinks)
    merged, apart = scene.step(merged=True), scene.step(merged=False)
    (out, lse), (other, other_lse) = scene.run(merged), scene.run(apart)
    torch.testing.assert_close(out, other, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse, other_lse, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(out, scene.reference(), atol=1e-5, rtol=1e-5)
    assert launched(scene, merged) == ["decode_kernel"]
    assert launched(scene, apart) == ["decode_kernel", "merge_ranges_kernel"]


def test_head_blocks_and_layers_with_fewer_heads() -> None:
    """Two programs a KV head; then a layer of one, in the same step and on counters of the same place."""
    wide, narrow = Heads(72, 1, 16, 16), Heads(3, 1, 16, 16)
    scene = Scene(EVEN, PARTS, wide)
    step = scene.step(merged=True)
    torch.testing.assert_close(scene.run(step)[0], scene.reference(), atol=1e-5, rtol=1e-5)
    small = Scene(EVEN, PARTS, narrow)
    out = torch.zeros_like(small.q)
    work = decode_launch.pieces(2, narrow, step.tiles, out.device)
    decode_launch.decode(small.q, small.cache, step, narrow, small.variant, out, None, work)
    torch.testing.assert_close(out, small.reference(), atol=1e-5, rtol=1e-5)
    assert not step.ranges[6:].flatten()[: 6 * 2].any()


@pytest.mark.parametrize(("lens", "tiles"), [(EVEN, PARTS), (UNEVEN, RANGES)])
def test_whoever_comes_last_merges_in_the_same_order(
    lens: list[int], tiles: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(lens, tiles)
    step = scene.step(merged=True)
    wanted = scene.run(step)
    programs = tiles.num_ranges * 2
    set_grid_idx = interpreter_builder.set_grid_idx
    for stride in (programs - 1, 5, 7):
        order = [i * stride % programs if programs % stride else i for i in range(programs)]
        assert sorted(order) == list(range(programs))
        monkeypatch.setattr(
            interpreter_builder, "set_grid_idx", lambda x, y, z, order=order: set_grid_idx(order[x], y, z)
        )
        for got, want in zip(scene.run(step), wanted, strict=True):
            assert torch.equal(got, want), "as after any other order, and in a step that ran before"
        counters = step.ranges[tiles.num_ranges :].flatten()[:programs]
        assert not counters.any(), "ready for the next layer"


def test_ranges_reset_what_an_aborted_step_left() -> None:
    scene = Scene(EVEN, PARTS)
    step = scene.step(merged=True)
    wanted, _ = scene.run(step)
    step.ranges[6:] = 3
    decode_launch.fill_ranges(step)
    assert torch.equal(scene.run(step)[0], wanted)


def test_every_record_leads_to_the_merge_of_its_request() -> None:
    """What `merge_if_last` makes of a range's own record is what the first range's says."""
    for lens, tiles in itertools.product(([300, 16, 7, 250, 90], [320] * 3, [1, 320]), (RANGES, PARTS)):
        if tiles.parts:
            tiles = replace(tiles, num_ranges=len(lens) * tiles.parts)
        step = Scene(lens, tiles).step(merged=True)
        records = step.ranges[: tiles.num_ranges].tolist()
        pieces = {record[8]: (r, record[9]) for r, record in enumerate(records) if record[9] > 0}
        for r, (b, at, count, *rest) in enumerate(records):
            full, taken = rest[7], 0
            while count > taken:
                total = max(1, -(-lens[b] // 16))
                own = min(count - taken, total - at)
                if own < total:
                    back = -(-at // full)
                    ahead = back * full - at + taken
                    assert pieces[b] == (r - back, -(-(ahead + total) // full))
                b, at, taken = b + 1, 0, taken + own
