"""The torch-npu stand-in against the oracle: conventions, refusals, traps, graphs whose lists are updated."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_pages import Pages, close, pages, queries

from anyattn.core.graph.host_arguments import note_host_arguments
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.errors import GraphError
from anyattn.platforms.ascend_graphs import AscendGraphPlatform
from anyattn.testing.emulators import EmulationError, emulating
from anyattn.testing.emulators.torch_npu_schemas import SCHEMAS

BF16, F16 = torch.bfloat16, torch.float16
LENGTHS, ROWS, TOTALS = [7, 130, 200], [3, 1, 20], [3, 4, 24]
MASK = torch.ones(2048, 2048, dtype=torch.int8).triu(1)
TOLERANCE = 8e-3
RECORDED = Path(__file__).parent.parent / "backends" / "ascend" / "torch_npu_schemas.json"


@pytest.fixture(name="npu")
def _npu() -> Iterator[Any]:
    with emulating("ascend"):
        yield importlib.import_module("torch_npu")


@pytest.fixture(name="old")
def _old() -> Iterator[Any]:
    with emulating("ascend", "ascend:310p"):
        yield importlib.import_module("torch_npu")


def _world(dtype: torch.dtype = BF16, **more: Any) -> Pages:
    return pages(LENGTHS, **{"page": 128, "heads": 2, "dim": 64, "dtype": dtype, **more})


def _tnd(world: Pages, **more: Any) -> dict[str, Any]:
    return {
        "atten_mask": MASK, "block_table": world.table, "input_layout": "TND", "block_size": 128,
        "actual_seq_lengths": TOTALS, "actual_seq_lengths_kv": LENGTHS, "num_key_value_heads": 2,
        "num_heads": 8, "scale": 0.125, "sparse_mode": 3, "softmax_lse_flag": True, **more,
    }  # fmt: skip


def _fia(npu: Any, world: Pages, q: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    caches = world.keys.flatten(2), world.values.flatten(2)
    found: tuple[torch.Tensor, torch.Tensor] = npu.npu_fused_infer_attention_score(
        q, *caches, **_tnd(world, **more)
    )
    return found


def test_schemas_are_the_recorded_ones() -> None:
    recorded = json.loads(RECORDED.read_text())
    known = {**recorded["schemas"], **recorded["described"]}
    assert len(known) >= 4
    assert {name: SCHEMAS[name] for name in known} == known


def test_tnd_over_pages(npu: Any) -> None:
    world, q = _world(), queries(24, 8, 64, BF16)
    want, sums = world.expected(q, ROWS)
    out, lse = _fia(npu, world, q)
    assert close(out, want, TOLERANCE)
    assert lse.shape == (24, 8, 1)
    assert close(lse[..., 0], sums, 1e-5)
    by_head = world.keys.transpose(1, 2).contiguous(), world.values.transpose(1, 2).contiguous()
    again, none = npu.npu_fused_infer_attention_score(q, *by_head, **_tnd(world, softmax_lse_flag=False))
    assert torch.equal(again, out)
    assert none.tolist() == [0.0]


def test_the_band_and_its_mask(npu: Any) -> None:
    world, q = _world(), queries(24, 8, 64, BF16)
    out, _ = _fia(npu, world, q, sparse_mode=4, pre_tokens=5 - 1, next_tokens=0)
    assert close(out, world.expected(q, ROWS, window=5)[0], TOLERANCE)
    turned, _ = _fia(npu, world, q, atten_mask=MASK.T.contiguous())
    assert torch.isnan(turned).all()
    everything, _ = _fia(npu, world, q, atten_mask=None, sparse_mode=0, pre_tokens=4)
    assert close(everything, world.expected(q, ROWS, kind="bidirectional")[0], TOLERANCE)


@pytest.mark.parametrize("layout", ["BSND", "BSH", "BNSD"])
def test_one_query_a_request_drops_masks_and_bands(npu: Any, layout: str) -> None:
    world, q = _world(), queries(3, 8, 64, BF16)
    given = {"BSND": q[:, None], "BSH": q.flatten(1)[:, None], "BNSD": q[:, :, None]}[layout]
    more = {"input_layout": layout, "actual_seq_lengths": None, "atten_mask": None, "pre_tokens": 3}
    out, lse = _fia(npu, world, given, **more)
    want, sums = world.expected(q, [1, 1, 1])
    assert out.shape == given.shape
    assert close(out.reshape(3, 8, 64), want, TOLERANCE)
    assert lse.shape == (3, 8, 1, 1)
    assert close(lse.reshape(3, 8), sums, 1e-5)


def test_ragged_keys_are_counted_up(npu: Any) -> None:
    q, k, v = queries(24, 8, 128, BF16), queries(24, 2, 128, BF16), queries(24, 2, 128, BF16) + 1
    call = npu.npu_fused_infer_attention_score_v2
    how = {
        "atten_mask": MASK, "input_layout": "TND", "actual_seq_qlen": TOTALS, "num_query_heads": 8,
        "num_key_value_heads": 2, "softmax_scale": 0.125, "sparse_mode": 3,
    }  # fmt: skip
    out, _ = call(q, k, v, actual_seq_kvlen=TOTALS, **how)
    alone, _ = call(q[4:], k[4:], v[4:], actual_seq_kvlen=[20], **{**how, "actual_seq_qlen": [20]})
    assert torch.equal(out[4:], alone)
    with pytest.raises(RuntimeError, match="must not fall"):
        call(q, k, v, actual_seq_kvlen=[3, 1, 20], **how)


def test_sinks_of_the_second_version(npu: Any) -> None:
    world, q = _world(), queries(24, 8, 64, BF16)
    sink = torch.linspace(-1, 2, 8).to(BF16)
    names = {
        "num_heads": "num_query_heads", "scale": "softmax_scale", "actual_seq_lengths": "actual_seq_qlen",
        "actual_seq_lengths_kv": "actual_seq_kvlen", "softmax_lse_flag": "return_softmax_lse",
    }  # fmt: skip
    how = {names.get(k, k): x for k, x in _tnd(world, softmax_lse_flag=False, learnable_sink=sink).items()}
    caches = world.keys.flatten(2), world.values.flatten(2)
    out, _ = npu.npu_fused_infer_attention_score_v2(q, *caches, **how)
    assert close(out, world.expected(q, ROWS, sinks=sink)[0], TOLERANCE)
    with pytest.raises(EmulationError, match="sink"):
        npu.npu_fused_infer_attention_score_v2(q, *caches, **{**how, "return_softmax_lse": True})
    with pytest.raises(RuntimeError, match="bfloat16"):
        npu.npu_fused_infer_attention_score_v2(q, *caches, **{**how, "learnable_sink": sink.float()})


def test_latents_with_rope_apart(npu: Any) -> None:
    world = _world(heads=1, dim=576, clean=True)
    q = queries(8, 4, 576, BF16)
    rows, totals = [2, 2, 4], [2, 4, 8]
    want = world.expected(q, rows, scale=0.1)[0][..., :512]
    parts = world.keys[..., :512].flatten(2).contiguous(), world.keys[..., 512:].flatten(2).contiguous()
    how: dict[str, Any] = {
        "atten_mask": MASK, "block_table": world.table, "input_layout": "TND", "block_size": 128,
        "actual_seq_qlen": totals, "actual_seq_kvlen": LENGTHS, "num_key_value_heads": 1,
        "num_query_heads": 4, "softmax_scale": 0.1, "sparse_mode": 3,
    }  # fmt: skip
    call, split = (
        npu.npu_fused_infer_attention_score_v2,
        (q[..., :512].contiguous(), q[..., 512:].contiguous()),
    )
    world.values[:] = world.keys
    want = world.expected(q, rows, scale=0.1)[0][..., :512]
    out, _ = call(split[0], parts[0], parts[0], query_rope=split[1], key_rope=parts[1], **how)
    assert close(out, want, TOLERANCE)
    tiles = [x.view(*x.shape[:2], -1, 16).transpose(1, 2)[:, None].contiguous() for x in parts]
    again, _ = call(split[0], tiles[0], tiles[0], query_rope=split[1], key_rope=tiles[1], **how)
    assert torch.equal(again, out)
    for change, text in (
        ({"num_query_heads": 3}, "N 4"), ({"key_rope": None}, "together"), ({"sparse_mode": 0}, "mode 3"),
        ({"query_rope": q[..., 512:]}, "contiguous"),
    ):  # fmt: skip
        given = {"query_rope": split[1], "key_rope": parts[1], **how, **change}
        with pytest.raises(RuntimeError, match=text):
            call(split[0], parts[0], parts[0], **given)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"actual_seq_lengths": ROWS}, "must not fall"),
        ({"actual_seq_lengths": [3, 4, 23]}, "561002"),
        ({"actual_seq_lengths": torch.tensor(TOTALS)}, "instead found type 'Tensor'"),
        ({"actual_seq_lengths_kv": None}, "must be given"),
        ({"block_size": 0}, "must not be 0"),
        ({"block_size": 64}, "isn't the cache's"),
        ({"num_heads": 4}, "isn't the query's N"),
        ({"num_key_value_heads": 8}, "no 8 heads"),
        ({"sparse_mode": 2}, "can't be 2"),
        ({"atten_mask": None}, "2048 x 2048"),
        ({"atten_mask": MASK.half()}, "dtype"),
        ({"input_layout": "SBH"}, "isn't supported"),
        ({"window": 3}, "Unknown keyword"),
    ],
)
def test_what_the_library_refuses(npu: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        _fia(npu, _world(), queries(24, 8, 64, BF16), **more)


def test_head_sizes_pages_and_chips(npu: Any, old: Any) -> None:
    with pytest.raises(RuntimeError, match="192/128/64"), emulating("ascend"):
        _fia(npu, _world(dim=96), queries(24, 8, 96, BF16))
    with pytest.raises(RuntimeError, match="multiple of 128"), emulating("ascend"):
        _fia(npu, _world(page=64), queries(24, 8, 64, BF16), block_size=64)
    with pytest.raises(RuntimeError, match="310P"):
        _fia(old, _world(F16), queries(24, 8, 64, F16))


def _nz(cache: torch.Tensor) -> torch.Tensor:
    pages, page = cache.shape[:2]
    return cache.reshape(pages, page, -1, 16).transpose(1, 2).contiguous()


def _nz_mask(rows: list[int], lengths: list[int]) -> torch.Tensor:
    places = torch.tensor([p for n, all_ in zip(rows, lengths, strict=True) for p in range(all_ - n, all_)])
    hidden = torch.arange(208)[None] > places[:, None]
    mask = torch.zeros(-(-sum(rows) // 16) * 16, 208, dtype=F16)
    mask[: sum(rows)].masked_fill_(hidden, -torch.inf)
    return mask.reshape(mask.shape[0], -1, 16).transpose(0, 1)[None].contiguous()


def test_atb_on_310p(old: Any) -> None:
    world, q = _world(F16), queries(24, 8, 64, F16)
    caches = {"key_cache": _nz(world.keys), "value_cache": _nz(world.values)}
    common = {
        "num_kv_heads": 2, "num_heads": 8, "scale_value": 0.125, "block_table": world.table,
        "context_lens": world.lengths, **caches,
    }  # fmt: skip
    out = torch.empty(3, 8, 64, dtype=F16)
    old._npu_paged_attention(query=q[:3], out=out, **common)
    assert close(out, world.expected(q[:3], [1, 1, 1])[0])
    out, lens = torch.empty_like(q), torch.tensor(ROWS, dtype=torch.int32)
    old._npu_paged_attention_splitfuse(query=q, mask=_nz_mask(ROWS, LENGTHS), seq_len=lens, out=out, **common)
    assert close(out, world.expected(q, ROWS)[0])
    with pytest.raises(RuntimeError, match="a mask is NZ"):
        old._npu_paged_attention_splitfuse(query=q, mask=MASK[:24].half(), seq_len=lens, out=out, **common)
    with pytest.raises(RuntimeError, match="a cache is NZ"):
        old._npu_paged_attention(query=q[:3], out=out[:3], **{**common, "key_cache": world.keys})


def test_flash_attention_pads_to_sixteen(old: Any) -> None:
    world = pages([5, 9], page=128, heads=2, dim=64, clean=True)
    q, rows = queries(16, 8, 64), [5, 9]
    flat = [world.keys.flatten(0, 1)[own] for own in world.slots]
    key = torch.cat([*flat, torch.zeros(2, 2, 64, dtype=F16)])
    value = torch.cat([*(world.values.flatten(0, 1)[own] for own in world.slots), key[14:]])
    out = torch.empty_like(q)
    mask = _nz_mask([16], [16])
    call = {"mask": mask, "scale_value": 0.125, "num_heads": 8, "num_kv_heads": 2}
    lens = torch.tensor(rows, dtype=torch.int32)
    old._npu_flash_attention(query=q, key=key, value=value, seq_len=lens, out=out, **call)
    assert close(out[:14], world.expected(q[:14], rows)[0])
    assert torch.isnan(out[14:]).all()
    with pytest.raises(RuntimeError, match="14 tokens, seq_len adds up"):
        old._npu_flash_attention(
            query=q[:14], key=key[:14], value=value[:14], seq_len=lens - 3, out=out[:14], **call
        )


def test_cache_writes(npu: Any) -> None:
    key, value = queries(3, 2, 64), queries(3, 2, 64) + 1
    slots = torch.tensor([5, 130, 0])
    caches = torch.zeros(2, 128, 2, 64, dtype=F16), torch.zeros(2, 128, 2, 64, dtype=F16)
    npu.npu_scatter_pa_kv_cache(key, value, *caches, slots, cache_mode="Norm")
    assert torch.equal(caches[0].flatten(0, 1)[slots], key)
    fractal = _nz(torch.zeros_like(caches[0])), _nz(torch.zeros_like(caches[1]))
    npu.npu_scatter_pa_kv_cache(key, value, *fractal, slots.int())
    assert torch.equal(fractal[1], _nz(caches[1]))
    with pytest.raises(RuntimeError, match="isn't NZ"):
        npu.npu_scatter_pa_kv_cache(key, value, *caches, slots)
    with pytest.raises(RuntimeError, match="int32"):
        npu._npu_reshape_and_cache(key, value, *caches, slots)
    npu._npu_reshape_and_cache(key, value, *caches, slots.int())
    with pytest.raises(RuntimeError, match="outside"):
        npu._npu_reshape_and_cache(key, value, *caches, torch.tensor([0, 1, 256], dtype=torch.int32))


def test_casts_make_new_memory(npu: Any) -> None:
    cache = torch.zeros(2, 8, 128, 16)
    cast = npu.npu_format_cast(cache, 29)
    assert (npu.get_npu_format(cache), npu.get_npu_format(cast)) == (2, 29)
    assert cast.data_ptr() != cache.data_ptr()
    assert npu.npu_format_cast(cast, 29) is cast


# --- graphs ------------------------------------------------------------------------------------------------


class _Step:
    """One recorded call whose lists change from step to step."""

    def __init__(self, npu: Any, *, note: bool = True) -> None:
        self.world, self.q = _world(clean=True), queries(3, 8, 64, BF16)
        self.lens, self.npu, self.note = [7, 100, 150], npu, note
        self.out = torch.zeros(3, 8, 64, dtype=BF16)

    def __call__(self) -> None:
        if self.note:
            note_host_arguments(lambda: {"actual_seq_lengths_kv": self.lens})
        how = {"actual_seq_lengths": [1, 2, 3], "actual_seq_lengths_kv": self.lens}
        self.out.copy_(_fia(self.npu, self.world, self.q, **how)[0])

    def right(self) -> bool:
        self.world.slots = [own[:n] for own, n in zip(_world().slots, self.lens, strict=True)]
        return close(self.out, self.world.expected(self.q, [1, 1, 1])[0], TOLERANCE)


def test_the_cpu_recorder_follows_lists(npu: Any) -> None:
    step, graph = _Step(npu), RecorderPlatform().new_graph()
    graph.capture(step)
    assert step.right()
    step.lens = [3, 130, 200]
    graph.replay()
    assert step.right()


def test_npu_graphs_take_new_lists_at_each_replay(npu: Any) -> None:
    step, graph = _Step(npu), AscendGraphPlatform(npu.npu).new_graph()
    graph.capture(step)
    for lens in ([3, 130, 200], [1, 2, 3]):
        step.lens = lens
        graph.replay()
        assert step.right()
    with pytest.raises(GraphError, match="host lists"):
        AscendGraphPlatform(npu.npu).new_graph().capture(_Step(npu, note=False))


def test_replays_without_updates_hang_and_frozen_lists_stay(npu: Any) -> None:
    step, graph = _Step(npu), npu.npu.NPUGraph()
    with npu.npu.graph(graph, auto_dispatch_capture=True):
        step()
    graph.replay()
    with pytest.raises(RuntimeError, match="hangs"):
        npu.npu.synchronize()
    step.lens = [3, 130, 200]
    graph.update(cpu_update_input=[{"actual_seq_kvlen": step.lens}])  # the second version's name: dropped
    assert not step.right()
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": step.lens}])
    graph.replay()
    assert step.right()
    frozen = npu.npu.NPUGraph()
    with npu.npu.graph(frozen):
        step()
    step.lens = [1, 2, 3]
    frozen.replay()
    assert not step.right()
    with pytest.raises(RuntimeError, match="does not support update"):
        frozen.update(cpu_update_input=[{}])
