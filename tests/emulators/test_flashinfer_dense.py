"""FlashInfer's stand-in, dense wrappers: arguments, errors and traps as the library's sources have them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from anyattn.testing.emulators import emulating
from anyattn.testing.emulators.flashinfer_common import host_reads

HALF = torch.bfloat16
LENS, NEW, PAGE, DIM, HEADS, KV = (21, 8), (3, 8), 8, 64, 4, 2
PAGES = [7, 2, 5, 3]  # of the first request, then the second


@pytest.fixture(name="fi")
def _fi() -> Iterator[ModuleType]:
    with emulating("flashinfer") as emulator:
        yield emulator.modules()["flashinfer"]


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Scene:
    """Two requests of 21 and 8 tokens in pages of 8; everything else in the pool is NaN."""

    def __init__(self, layout: str = "NHD", dtype: torch.dtype = HALF) -> None:
        generator = torch.Generator().manual_seed(0)
        self.indptr, self.indices, self.last = ints([0, 3, 4]), ints(PAGES), ints([5, 8])
        self.qo = ints([0, 3, 11])
        shape = (9, PAGE, KV, DIM)
        self.k, self.v = (torch.full(shape, torch.nan).to(dtype) for _ in "kv")
        self.keys, self.values = [], []
        for pages, length in ((PAGES[:3], LENS[0]), (PAGES[3:], LENS[1])):
            for cache, copies in ((self.k, self.keys), (self.v, self.values)):
                rows = torch.randn(length, KV, DIM, generator=generator).to(dtype)
                copies.append(rows)
                for place in range(length):
                    cache[pages[place // PAGE], place % PAGE] = rows[place]
        if layout == "HND":
            self.k, self.v = (x.transpose(1, 2).contiguous() for x in (self.k, self.v))
        self.q = torch.randn(11, HEADS, DIM, generator=generator).to(HALF)
        self.decode_q = self.q[:2]

    @property
    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.v

    def want(
        self, q: torch.Tensor, new: tuple[int, ...], *, left: int = -1, causal: bool = True,
        scale: float = 0.125,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """(out, LSE in base 2), row by row."""
        outs, sums, row = [], [], 0
        for keys, values, count in zip(self.keys, self.values, new, strict=True):
            for token in range(count):
                place = len(keys) - count + token
                first = max(0, place - left) if left >= 0 else 0
                seen = slice(first, place + 1 if causal else len(keys))
                for head in range(HEADS):
                    logits = (keys[seen, head // 2].double() @ q[row, head].double()) * scale
                    sums.append(torch.logsumexp(logits, 0) / math.log(2))
                    outs.append(torch.softmax(logits, 0) @ values[seen, head // 2].double())
                row += 1
        return torch.stack(outs).view(row, HEADS, DIM), torch.stack(sums).view(row, HEADS)

    def plan_decode(self, wrapper: Any, **options: Any) -> None:
        wrapper.plan(
            self.indptr, self.indices, self.last, HEADS, KV, DIM, PAGE, q_data_type=HALF, **options
        )  # fmt: skip

    def plan_prefill(self, wrapper: Any, **options: Any) -> None:
        given = {"q_data_type": HALF, "causal": True, **options}
        wrapper.plan(self.qo, self.indptr, self.indices, self.last, HEADS, KV, DIM, PAGE, **given)


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 12, dtype=torch.uint8)


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.allclose(got.double(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("cores", [False, True])
@pytest.mark.parametrize("left", [-1, 4])
def test_decode(fi: ModuleType, layout: str, cores: bool, left: int) -> None:
    scene = Scene(layout)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(), layout, use_tensor_cores=cores)
    scene.plan_decode(wrapper, window_left=left)
    out, lse = wrapper.run(scene.decode_q, scene.cache, return_lse=True)
    want = scene.want(scene.decode_q, (1, 1), left=left)
    assert close(out, want[0])
    assert torch.allclose(lse.double(), want[1], atol=1e-3)


def test_decode_refuses_what_the_library_refuses(fi: ModuleType) -> None:
    scene, make = Scene(), fi.BatchDecodeWithPagedKVCacheWrapper
    wrapper = make(workspace())
    with pytest.raises(RuntimeError, match="group_size: 5"):
        wrapper.plan(scene.indptr, scene.indices, scene.last, 10, 2, DIM, PAGE, q_data_type=HALF)
    with pytest.raises(ValueError, match="tensor-core"):
        scene.plan_decode(wrapper, q_len_per_req=2)
    with pytest.raises(ValueError, match="fixed_split_size"):
        scene.plan_decode(wrapper, fixed_split_size=4)
    with pytest.raises(ValueError, match="kv_len >= q_len"):
        scene.plan_decode(make(workspace(), use_tensor_cores=True), q_len_per_req=9)
    with pytest.raises(KeyError, match="kv_layout"):
        make(workspace(), "HNDD")
    wrapper.plan(scene.indptr, scene.indices, scene.last, HEADS, KV, DIM, PAGE)
    with pytest.raises(ValueError, match="dtype"):  # float16 unless said otherwise
        wrapper.run(scene.decode_q, scene.cache)
    scene.plan_decode(wrapper, window_left=3)
    with pytest.raises(AssertionError):
        wrapper.run(scene.decode_q, scene.cache, window_left=4)
    wide = torch.zeros(2, HEADS * DIM + 3, dtype=HALF)[:, : HEADS * DIM].view(2, HEADS, DIM)
    with pytest.raises(RuntimeError, match="misaligned"):
        wrapper.run(wide, scene.cache)


def test_sinks_of_plain_wrappers_are_dropped(fi: ModuleType) -> None:
    scene = Scene()
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    scene.plan_decode(wrapper)
    plain = wrapper.run(scene.decode_q, scene.cache)
    assert torch.equal(wrapper.run(scene.decode_q, scene.cache, sinks=torch.full((HEADS,), 9.0)), plain)


def test_scales_of_a_planned_wrapper(fi: ModuleType) -> None:
    scene = Scene()
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    scene.plan_decode(wrapper, sm_scale=0.25)
    got = wrapper.run(scene.decode_q, scene.cache, k_scale=2.0, v_scale=4.0)
    assert close(got, scene.want(scene.decode_q, (1, 1), scale=0.5)[0] * 4)
    with pytest.raises(TypeError, match="sm_scale"):
        wrapper.run(scene.decode_q, scene.cache, k_scale=torch.tensor([2.0]))


def test_rows_without_a_page_are_zero(fi: ModuleType) -> None:
    scene = Scene()
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace())
    wrapper.plan(ints([0, 0, 1]), ints([3]), ints([0, 8]), HEADS, KV, DIM, PAGE, q_data_type=HALF)
    out, lse = wrapper.run(scene.decode_q, scene.cache, return_lse=True)
    assert not out[0].any()
    assert torch.isneginf(lse[0]).all()
    assert torch.isfinite(out[1]).all()


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [-1, 4])
def test_paged_prefill(fi: ModuleType, backend: str, causal: bool, left: int) -> None:
    scene = Scene()
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
    scene.plan_prefill(wrapper, causal=causal, window_left=left)
    out, lse = wrapper.run(scene.q, scene.cache, return_lse=True, lse_base="ln", lse_layout="HN")
    want = scene.want(scene.q, NEW, causal=causal, left=left)
    assert close(out, want[0])
    assert torch.allclose(lse.T.double(), want[1] * math.log(2), atol=1e-3)


def test_prefill_is_open_unless_told(fi: ModuleType) -> None:
    scene, wrapper = Scene(), fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    wrapper.plan(
        scene.qo, scene.indptr, scene.indices, scene.last, HEADS, KV, DIM, PAGE, q_data_type=HALF
    )  # fmt: skip
    assert close(wrapper.run(scene.q, scene.cache), scene.want(scene.q, NEW, causal=False)[0])


def test_masks_replace_the_causal_rule(fi: ModuleType) -> None:
    scene, wrapper = Scene(), fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2")
    everything = torch.ones(3 * 21 + 8 * 8, dtype=torch.bool)
    scene.plan_prefill(wrapper, custom_mask=everything)
    assert close(wrapper.run(scene.q, scene.cache), scene.want(scene.q, NEW, causal=False)[0])
    # Packed by the caller: the second request's bytes are looked for at the number of cells before it.
    packed = torch.full((3 * 21 + 8,), 255, dtype=torch.uint8)
    scene.plan_prefill(wrapper, packed_custom_mask=packed)
    assert close(wrapper.run(scene.q, scene.cache), scene.want(scene.q, NEW, causal=False)[0])
    scene.plan_prefill(wrapper, packed_custom_mask=packed[:16])
    assert not wrapper.run(scene.q, scene.cache)[3:].any()
    scene.plan_prefill(wrapper)
    assert close(wrapper.run(scene.q, scene.cache), scene.want(scene.q, NEW)[0])


def test_fa3_has_no_masks_and_auto_decides_once(fi: ModuleType) -> None:
    scene, wrapper = Scene(), fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    scene.plan_prefill(wrapper)  # auto is fa3 here
    scene.plan_prefill(wrapper, custom_mask=torch.ones(127, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="not supported"):
        wrapper.run(scene.q, scene.cache)


def test_graph_wrappers_keep_their_shape_and_their_mask(fi: ModuleType) -> None:
    scene = Scene()
    buffers = {
        "qo_indptr_buf": torch.zeros_like(scene.qo),
        "paged_kv_indptr_buf": torch.zeros_like(scene.indptr),
        "paged_kv_indices_buf": ints([0] * 6),
        "paged_kv_last_page_len_buf": torch.zeros_like(scene.last),
    }
    make = fi.BatchPrefillWithPagedKVCacheWrapper
    wrapper = make(workspace(), use_cuda_graph=True, backend="fa2", **buffers)
    scene.plan_prefill(wrapper)
    assert torch.equal(buffers["paged_kv_indices_buf"], ints([*PAGES, 0, 0]))
    assert close(wrapper.run(scene.q, scene.cache), scene.want(scene.q, NEW)[0])
    scene.qo = ints([0, 3, 12])
    with pytest.raises(ValueError, match="total number of rows"):
        scene.plan_prefill(wrapper)
    buffers["paged_kv_last_page_len_buf"].copy_(
        ints([4, 8])
    )  # fewer keys on the same pages: read at run time
    scene.qo = ints([0, 3, 11])
    masked = make(
        workspace(), use_cuda_graph=True, backend="fa2", **buffers,
        custom_mask_buf=torch.zeros(64, dtype=torch.uint8), mask_indptr_buf=ints([0, 0, 0]),
    )  # fmt: skip
    scene.plan_prefill(masked)  # no mask given: the buffer's zeros are one
    assert not masked.run(scene.q, scene.cache).any()


def test_a_schedule_overwritten_or_for_other_pages_is_garbage(fi: ModuleType) -> None:
    scene = Scene()
    one, two = (fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2") for _ in range(2))
    shared = torch.zeros(1 << 10, dtype=torch.uint8)
    for wrapper in (one, two):
        wrapper.reset_workspace_buffer(workspace(), shared)
        scene.plan_prefill(wrapper)
    assert torch.isfinite(two.run(scene.q, scene.cache)).all()
    assert torch.isnan(one.run(scene.q, scene.cache)).all()


def test_results_are_written_without_strides(fi: ModuleType) -> None:
    scene, wrapper = Scene(), fi.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2")
    scene.plan_prefill(wrapper)
    wide = torch.zeros(11, HEADS * DIM + 8, dtype=HALF)
    view = wide[:, : HEADS * DIM].view(11, HEADS, DIM)
    wrapper.run(scene.q, scene.cache, out=view)
    assert not close(view, scene.want(scene.q, NEW)[0])
    assert close(wide.view(-1)[: 11 * HEADS * DIM].view(11, HEADS, DIM), scene.want(scene.q, NEW)[0])


def test_plan_reads_offsets_on_the_host(fi: ModuleType) -> None:
    scene, wrapper = Scene(), fi.BatchPrefillWithPagedKVCacheWrapper(workspace())
    host_reads.clear()
    scene.plan_prefill(wrapper)
    assert [name for name, _ in host_reads] == ["qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len"]
    host_reads.clear()
    scene.plan_prefill(wrapper, seq_lens=ints(LENS))
    assert [name for name, _ in host_reads][-1] == "seq_lens"


def ragged(scene: Scene) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return ints([0, 21, 29]), torch.cat(scene.keys), torch.cat(scene.values)


def test_ragged_prefill(fi: ModuleType) -> None:
    scene, wrapper = Scene(), fi.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    offsets, k, v = ragged(scene)
    wrapper.plan(scene.qo, offsets, HEADS, KV, DIM, causal=True, q_data_type=HALF)
    out, lse = wrapper.run(scene.q, k, v, return_lse=True, k_scale=2.0, v_scale=2.0)  # dropped: not fp8
    want = scene.want(scene.q, NEW)
    assert close(out, want[0])
    assert torch.allclose(lse.double(), want[1], atol=1e-3)


def test_a_ragged_wrapper_keeps_the_mask_of_an_earlier_plan(fi: ModuleType) -> None:
    scene, wrapper = Scene(), fi.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="fa2")
    offsets, k, v = ragged(scene)
    plan = {"causal": True, "q_data_type": HALF}
    wrapper.plan(scene.qo, offsets, HEADS, KV, DIM, custom_mask=torch.ones(127, dtype=torch.bool), **plan)
    wrapper.plan(scene.qo, offsets, HEADS, KV, DIM, **plan)
    assert close(wrapper.run(scene.q, k, v), scene.want(scene.q, NEW, causal=False)[0])


def test_the_sink_wrapper(fi: ModuleType) -> None:
    scene, sink = Scene(), torch.tensor([0.5, -1.0, 2.0, 0.0])
    wrapper = fi.BatchAttentionWithAttentionSinkWrapper(
        workspace(), backend="fa2", head_dim_qk=64, head_dim_vo=64
    )
    scene.plan_prefill(wrapper, logits_soft_cap=0.01)  # the variant has no cap
    out, lse = wrapper.run(scene.q, scene.cache, sink, 0.125, return_lse=True)
    want, sums = scene.want(scene.q, NEW)
    natural = sums * math.log(2)
    assert close(out, want * torch.sigmoid(natural - sink)[..., None])
    assert torch.allclose(lse.double() * math.log(2), torch.logaddexp(natural, sink.double()), atol=1e-3)
    with pytest.raises(TypeError, match="sink"):
        wrapper.run(scene.q, scene.cache)


def test_merges_are_in_base_2(fi: ModuleType) -> None:
    v = torch.randn(2, 3, 64, dtype=HALF)
    s = torch.tensor([[0.0, -math.inf, 3.0]] * 2)
    out, lse = fi.merge_state(v, s, -v, s + 1)
    assert torch.allclose(lse[:, 0], torch.full((2,), math.log2(3)))
    assert close(out[:, 2], (v[:, 2] * (1 - 2) / 3).double())
    assert torch.isneginf(lse[:, 1]).all()
    assert not out[:, 1].any()
    mine, sums = v.clone(), s.clone()
    fi.merge_state_in_place(mine, sums, -v, s + 1, torch.tensor([1, 0], dtype=torch.uint8))
    assert torch.equal(mine[0], out[0])
    assert torch.equal(mine[1], v[1])
    stacked, total = fi.merge_states(torch.stack((v, -v), 1), torch.stack((s, s + 1), 1))
    assert torch.equal(stacked, out)
    assert torch.equal(total, lse)
    with pytest.raises(RuntimeError, match="contiguous"):
        fi.merge_state(v.transpose(0, 1), s.T, v.transpose(0, 1), s.T)
    with pytest.raises(RuntimeError, match="unsupported data type"):
        fi.merge_state(v.float(), s, v.float(), s)


def test_appended_rows_land_in_their_pages(fi: ModuleType) -> None:
    scene = Scene()
    owners, places = fi.get_batch_indices_positions(scene.qo, ints(LENS), 12)
    assert owners.tolist() == [0] * 3 + [1] * 8 + [-1]
    assert places.tolist() == [18, 19, 20, *range(8), 0]
    rows = torch.randn(12, KV, DIM).to(HALF)
    fi.append_paged_kv_cache(
        rows, rows, owners, places, scene.cache, scene.indices, scene.indptr, scene.last
    )  # fmt: skip
    assert torch.equal(scene.k[PAGES[2], 4], rows[2])
    assert torch.equal(scene.v[PAGES[3], 7], rows[10])
    assert torch.isnan(scene.k[0].float()).all()
