"""`ascend` for dense layers: what it passes to torch-npu, and what comes out of a torch_npu that attends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from npu_stand import RECORDED, Calls, standing
from npu_steps import DENSE, LENGTHS, MODES, World, world

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.core.traits import HostLengthNeed, MixedSupport, SharedReadEnds
from anyattn.errors import BackendBuildError, PoolError

V1, V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
BF16 = torch.bfloat16


@pytest.fixture
def calls() -> Iterator[Calls]:
    with standing() as found:
        yield found


def reference(spec: anyattn.AttentionSpec, dtype: torch.dtype, mode: str, **options: Any) -> Any:
    made = world(spec, "cpu:avx2", dtype, backend="torch_native", layout="NHD")
    return made.attend(mode, **options)[0]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("spec", "dtype", "layout"),
    [
        (DENSE, torch.float16, "NHD"),
        (DENSE, torch.float16, "HND"),
        (replace(DENSE, sliding_window=50), torch.float16, "NHD"),
        (replace(DENSE, scale=0.3), BF16, "NHD"),
    ],
    ids=["nhd", "hnd", "window", "scale"],
)
def test_numbers(
    calls: Calls, spec: anyattn.AttentionSpec, dtype: torch.dtype, layout: str, mode: str
) -> None:
    ours, _ = world(spec, dtype=dtype, layout=layout).attend(mode, return_lse=True)
    theirs = reference(spec, dtype, mode, return_lse=True)
    assert error(ours[0], theirs[0]) < (1e-2 if dtype is BF16 else 1e-3)
    assert error(ours[1], theirs[1]) < 1e-5
    assert len(calls.seen) == 1


@pytest.mark.parametrize("mode", MODES)
def test_sinks_go_through_the_second_version(calls: Calls, mode: str) -> None:
    spec = replace(DENSE, sinks=True)
    ours, _ = world(spec, dtype=BF16).attend(mode)
    assert error(ours, reference(spec, BF16, mode)) < 2e-2
    given = calls.last(V2)
    assert given["learnable_sink"].dtype is BF16
    assert given["input_layout"] == "TND"


@pytest.mark.parametrize("mode", [m for m in MODES if m != "verify"])
def test_310p(calls: Calls, mode: str) -> None:
    ours, _ = world(host="ascend:310p").attend(mode)
    assert error(ours, reference(DENSE, torch.float16, mode)) < 1e-3
    name, given = calls.seen[-1]
    assert name == ("_npu_paged_attention" if mode == "decode" else "_npu_paged_attention_splitfuse")
    assert given["key_cache"].shape[1:] == (2 * 64 // 16, 128, 16)
    assert given["context_lens"].dtype is torch.int32


def test_decode_is_the_documented_incremental_call(calls: Calls) -> None:
    made = world()
    _, plan = made.attend("decode")
    given = calls.last(V1)
    prefix, _ = LENGTHS["decode"]
    assert given["input_layout"] == "BSND"
    assert given["query"].shape == (5, 1, 8, 64)
    assert given["actual_seq_lengths"] is None
    assert given["actual_seq_lengths_kv"] == [p + 1 for p in prefix]
    assert given["key"].shape == (made.pool.num_pages, 128, 2 * 64)
    assert given["key"].data_ptr() == made.pool.key_cache(0).data_ptr()
    assert given["block_table"] is next(iter(plan.tables.values())).blocks
    assert (given["num_heads"], given["num_key_value_heads"], given["block_size"]) == (8, 2, 128)
    assert (given["sparse_mode"], given["atten_mask"]) == (0, None)


def test_hnd_pools_are_read_as_they_lie(calls: Calls) -> None:
    world(layout="HND").attend("decode")
    given = calls.last(V1)
    assert given["input_layout"] == "BNSD"
    assert given["query"].shape == (5, 8, 1, 64)
    assert given["key"].shape[1:] == (2, 128, 64)


def test_a_mixed_step_is_one_call_over_pages(calls: Calls) -> None:
    world().attend("mixed")
    assert [name for name, _ in calls.seen] == [V1]
    given = calls.last(V1)
    prefix, new = LENGTHS["mixed"]
    assert given["actual_seq_lengths"] == [sum(new[: i + 1]) for i in range(5)]
    assert given["actual_seq_lengths_kv"] == [p + n for p, n in zip(prefix, new, strict=True)]
    assert given["sparse_mode"] == 3
    assert given["atten_mask"].shape == (2048, 2048)


def test_a_fresh_step_counts_keys_cumulatively_and_reads_no_pages(calls: Calls) -> None:
    world().attend("fresh")
    given = calls.last(V1)
    assert given["block_table"] is None
    assert given["actual_seq_lengths"] == given["actual_seq_lengths_kv"] == [3, 153, 154, 282, 322]
    assert given["key"].shape == (322, 2, 64)


def test_a_window_is_a_band_of_one_less_and_its_table_is_trimmed(calls: Calls) -> None:
    world(replace(DENSE, sliding_window=50)).attend("decode")
    given = calls.last(V1)
    assert (given["sparse_mode"], given["pre_tokens"], given["next_tokens"]) == (4, 49, 0)
    assert given["input_layout"] == "TND"
    assert max(given["actual_seq_lengths_kv"]) <= 128 + 50  # the longest request has 700 tokens


def test_padding(calls: Calls) -> None:
    """Padded decode rows read nothing; single rows behind the last request aren't given to the kernel."""
    made = world()
    made.batch("fresh")
    batch = anyattn.ForwardBatch.decode(
        [0, 8, 8], [1, 1, 1], [int(made.slots[0][0]), 0, 0], num_padding_requests=2
    )
    _attend(made, batch)
    assert calls.last(V1)["actual_seq_lengths_kv"] == [1, 0, 0]
    batch = anyattn.ForwardBatch.extend(
        [0], [0], [3], [*made.slots[0][:3].tolist(), 0, 0], num_padding_tokens=2
    )
    out = _attend(made, batch)
    assert calls.last(V1)["query"].shape[0] == 3
    assert calls.last(V1)["actual_seq_lengths"] == [3]
    assert not out[3:].any()


def _attend(made: World, batch: anyattn.ForwardBatch) -> torch.Tensor:
    plan = made.backend.init_forward_metadata(batch)
    q, k, v = made.inputs(batch.num_tokens, materialised=False)
    with anyattn.forward_context(made.backend, plan):
        out = made.layer(q, k, v, batch)
    assert isinstance(out, torch.Tensor)
    return out


def test_what_it_declares(calls: Calls) -> None:
    backend = world().backend
    for mode in (ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.EXTEND):
        traits = backend.traits(mode)
        assert traits.host_lengths is HostLengthNeed.EXACT
        assert traits.mixed is MixedSupport.NATIVE
        assert traits.shared_read_ends is SharedReadEnds.IN_REPLAY
    assert backend.get_cuda_graph_seq_len_fill_value(ForwardMode.DECODE, 1) == 0
    assert backend.get_cuda_graph_seq_len_fill_value(ForwardMode.TARGET_VERIFY, 4) == 4
    assert calls.seen == []


def test_sizes_beyond_the_operator_are_refused(calls: Calls) -> None:
    wide = anyattn.AttentionSpec(num_q_heads=1024, num_kv_heads=1024, head_dim=64)
    with pytest.raises(PoolError, match="too wide"):
        world(wide, pages=1)
    world(wide, layout="HND", pages=1)
    assert calls.seen == []


def test_without_the_library_the_error_is_ours() -> None:
    with pytest.raises(BackendBuildError, match="torch-npu"):
        world()


def test_described_operators_have_the_types_of_the_binary() -> None:
    """ATB's operators keep no argument names in the library: names are the engines', types the binary's."""
    kinds = {"int": "int", "float": "float", "Tensor": "Tensor", "Optional[Tensor]": "Tensor?"}
    for name, types in RECORDED["cpp_types"].items():
        schema = torch._C.parse_schema(RECORDED["described"][name])
        assert [kinds[str(a.type)] for a in schema.arguments] == types
    assert set(RECORDED["cpp_types"]) == set(RECORDED["described"])


@pytest.mark.parametrize("name", [V1, V2])
def test_lists_of_captured_calls_are_those_that_a_graph_updates(calls: Calls, name: str) -> None:
    spec, dtype = (replace(DENSE, sinks=True), BF16) if name == V2 else (DENSE, torch.float16)
    _, plan = world(spec, dtype=dtype).attend("verify")
    (call,) = plan.private.calls
    assert list(call.lengths()) == RECORDED["updatable"][name]
    assert calls.last(name)["block_size"] == 128
