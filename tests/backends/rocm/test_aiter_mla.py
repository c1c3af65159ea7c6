"""`aiter` on latents: stand-ins of both builds by definition, the persistent kernel's work lists by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyattn
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.mla import MLAMethod
from anyattn.errors import SelectionError
from anyattn.testing.emulators import emulating
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_judge import check_mla_case
from anyattn.testing.selecting import select_for

_PYPI = "rocm:gfx942"
_MAIN = "rocm:gfx942+amd-aiter==0.1.20"
_SIZES: dict[str, Any] = {
    "rank": 512, "rope": 64, "nope": 128, "v_dim": 128, "num_q_heads": 16, "page_size": 64,
    "dtype": "bfloat16", "kv_dtype": "bfloat16", "return_lse": False,
}  # fmt: skip


def _case(mode: str, prefix: tuple[int, ...], extend: tuple[int, ...], **fields: Any) -> MLACase:
    return MLACase(**{**_SIZES, "mode": mode, "prefix_lens": prefix, "extend_lens": extend, **fields})


@pytest.mark.parametrize("host", [_PYPI, _MAIN])
@pytest.mark.parametrize(
    "case",
    [
        _case("decode", (200, 0, 63), (1, 1, 1), slot_layout="shuffled_pages", strided=True),
        _case("decode", (70, 3), (1, 1), num_q_heads=8, give_out=True),
        _case("decode", (70, 3), (1, 1), num_q_heads=128, kv_dtype="float8_e4m3fnuz", kv_scale=0.5),
        _case("verify", (130, 2), (3, 3), num_q_heads=128),
        _case("verify", (130, 2), (4, 1)),
        _case("extend", (90, 0), (5, 20), method="absorbed"),
        _case("extend", (90, 0), (5, 20), method="materialised", chunk_tokens=32),
        _case("extend", (40,), (9,), method="materialised", kv_dtype="float8_e4m3fnuz", kv_scale=2.0),
    ],
    ids=["decode", "padded heads", "fp8", "verify", "ragged", "absorbed", "chunks", "fp8 chunks"],
)
def test_judged_by_definition(host: str, case: MLACase) -> None:
    with emulating("aiter", host):
        report = check_mla_case(case, backend="aiter", host=host)
    assert report.passed, report


def _select(heads: int, host: str, **options: Any) -> Any:
    spec = anyattn.AttentionSpec(
        num_q_heads=heads, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5,
        mla=anyattn.MLASpec(),
    )  # fmt: skip
    limits = anyattn.Limits(
        max_requests=4, max_tokens=64, max_context=256, max_draft_tokens=options.pop("drafts", 0)
    )
    return (
        spec,
        limits,
        select_for([spec], device="cpu", host=host, dtype="bfloat16", limits=limits, **options),
    )


@pytest.mark.parametrize(("heads", "build"), [(12, _PYPI), (32, _PYPI), (64, _PYPI), (96, _MAIN)])
def test_head_counts_without_a_kernel_are_refused(heads: int, build: str) -> None:
    with pytest.raises(SelectionError, match="head_count"):
        _select(heads, build, decode="aiter")


def test_engines_second_choice_says_so() -> None:
    _, _, decision = _select(32, _MAIN, decode="aiter")
    assert "Triton" in (decision.decode.row.degraded or "")


# --- work lists --------------------------------------------------------------------------------------------

_LISTS = (
    "work_meta_data",
    "work_indptr",
    "work_info_set",
    "reduce_indptr",
    "reduce_final_map",
    "reduce_partial_map",
)


class _Planned:
    """What a fake planner was told. `made`: by the names of `mla_decode_fwd`."""

    def __init__(self) -> None:
        self.made: dict[str, torch.Tensor] = {}
        self.lens: torch.Tensor | None = None
        self.dtypes: tuple[Any, Any] | None = None

    def sizes(
        self, batch_size: int, max_seqlen_qo: int, num_head_qo: int, q_dtype: Any, kv_dtype: Any,
        is_sparse: int, fast_mode: bool = True,
    ) -> tuple[tuple[Any, torch.dtype], ...]:  # fmt: skip
        assert (num_head_qo, is_sparse, fast_mode) == (16, False, True)
        return (
            (2, torch.uint64), (9, torch.int32), ((batch_size, 8), torch.int32),
            (batch_size * max_seqlen_qo + 1, torch.int32), ((batch_size, 2), torch.int32), (7, torch.int32),
        )  # fmt: skip

    def pypi(
        self, seqlens_qo_indptr: Any, seqlens_kv_indptr: Any, num_heads_per_head_k: int, num_heads_k: int,
        is_causal: bool, work_metadata_ptrs: Any, work_indptr: Any, work_info: Any, reduce_indptr: Any,
        reduce_final_map: Any, reduce_partial_map: Any, kv_granularity: int = 16, max_seqlen_qo: int = -1,
        uni_seqlen_qo: int = -1, fast_mode: bool = True, topk: int = -1, max_split_per_batch: int = -1,
    ) -> None:  # fmt: skip
        assert (num_heads_per_head_k, num_heads_k, is_causal) == (16, 1, True)
        assert max_seqlen_qo == uni_seqlen_qo > 0
        lists = (
            work_metadata_ptrs,
            work_indptr,
            work_info,
            reduce_indptr,
            reduce_final_map,
            reduce_partial_map,
        )
        self.made, self.lens = dict(zip(_LISTS, lists, strict=True)), seqlens_kv_indptr.clone()

    def main(
        self, seqlens_qo_indptr: Any, seqlens_kv_indptr: Any, kv_last_page_lens: Any,
        num_heads_per_head_k: int, num_heads_k: int, is_causal: bool, work_metadata_ptrs: Any,
        work_info_set: Any, work_indptr: Any, reduce_indptr: Any, reduce_final_map: Any,
        reduce_partial_map: Any,
        page_size: int = 1, kv_granularity: int = 16, max_seqlen_qo: int = -1, uni_seqlen_qo: int = -1,
        fast_mode: bool = True, topk: int = -1, max_split_per_batch: int = -1,
        dtype_q: Any = None, dtype_kv: Any = None,
    ) -> None:  # fmt: skip
        assert kv_last_page_lens.eq(1).all()
        assert page_size == 1
        self.dtypes = dtype_q, dtype_kv
        self.pypi(
            seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, is_causal,
            work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
            reduce_partial_map, max_seqlen_qo=max_seqlen_qo, uni_seqlen_qo=uni_seqlen_qo,
        )  # fmt: skip


def _with_lists(monkeypatch: pytest.MonkeyPatch, build: str) -> tuple[_Planned, list[dict[str, Any]]]:
    """A planner in the stand-in, and what every decode was given; the plain kernel answers."""
    planned, given = _Planned(), []
    attention, mla = importlib.import_module("aiter.ops.attention"), importlib.import_module("aiter.mla")
    monkeypatch.setattr(attention, "get_mla_metadata_info_v1", planned.sizes, raising=False)
    make: Callable[..., None] = planned.main if build == _MAIN else planned.pypi
    monkeypatch.setattr(attention, "get_mla_metadata_v1", make, raising=False)
    real = mla.mla_decode_fwd

    def mla_decode_fwd(
        *args: Any, work_meta_data: Any = None, work_indptr: Any = None, work_info_set: Any = None,
        reduce_indptr: Any = None, reduce_final_map: Any = None, reduce_partial_map: Any = None,
        kv_scale: Any = None, page_size: int = 1, nhead_kv: int = 1, **more: Any,
    ) -> Any:  # fmt: skip
        lists = (
            work_meta_data,
            work_indptr,
            work_info_set,
            reduce_indptr,
            reduce_final_map,
            reduce_partial_map,
        )
        given.append(dict(zip(_LISTS, lists, strict=True)))
        return real(*args, kv_scale=kv_scale, **more)

    monkeypatch.setattr(mla, "mla_decode_fwd", mla_decode_fwd)
    return planned, given


@pytest.mark.parametrize("build", [_PYPI, _MAIN], ids=["pypi", "main"])
def test_work_lists_reach_the_kernel_by_name(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    with emulating("aiter", build):
        planned, given = _with_lists(monkeypatch, build)
        for case in (_case("decode", (200, 0), (1, 1)), _case("verify", (20, 3), (4, 4))):
            assert check_mla_case(case, backend="aiter", host=build).passed
            assert planned.lens is not None
            assert planned.lens.tolist() == [0, *torch.tensor(case.seq_lens).cumsum(0).tolist()]
            for name in _LISTS:
                assert given[-1][name] is planned.made[name], name
        assert planned.dtypes == ((torch.bfloat16, torch.bfloat16) if build == _MAIN else None)
        longer = _case("verify", (20, 3), (6, 6))
        assert check_mla_case(longer, backend="aiter", host=build).passed
        assert given[-1]["work_meta_data"] is None, "more tokens than the persistent kernel knows"


def test_work_lists_of_a_graph_stay_and_follow_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("aiter", _PYPI):
        planned, _ = _with_lists(monkeypatch, _PYPI)
        _, limits, decision = _select(16, _PYPI, backend="aiter")
        pool = anyattn.kv.create_pool(decision, num_slots=16 * decision.kv.page_size)
        assert isinstance(pool, MLAPool)
        table = anyattn.kv.RequestTable(max_requests=4, max_context=256, device="cpu")
        for row in range(2):
            table.req_to_token[row] = pool.page_size * (1 + 4 * row) + torch.arange(256)
        backend = anyattn.create_backend(decision, pool, table)
        backend.init_cuda_graph_state(limits)

        def batch(*lens: int) -> anyattn.ForwardBatch:
            slots = [int(table.req_to_token[row, n - 1]) for row, n in enumerate(lens)]
            return anyattn.ForwardBatch.decode([0, 1], list(lens), slots)

        plan = backend.init_forward_metadata_out_graph(batch(1, 1), in_capture=True)
        backend.init_forward_metadata_in_graph(plan)
        before = {name: tensor.data_ptr() for name, tensor in planned.made.items()}
        backend.init_forward_metadata_out_graph(batch(120, 33), captured=plan)
        backend.init_forward_metadata_in_graph(plan)
        assert {name: tensor.data_ptr() for name, tensor in planned.made.items()} == before
        assert planned.lens is not None
        assert planned.lens.tolist() == [0, 120, 153]


def test_ragged_drafts_need_a_prefill_kernel() -> None:
    with emulating("aiter", _MAIN), pytest.raises(SelectionError, match="verify"):
        check_mla_case(_case("verify", (20, 3), (4, 2), num_q_heads=32), backend="aiter", host=_MAIN)


def test_a_prefill_is_whichever_is_cheaper() -> None:
    with emulating("aiter", _PYPI):
        _, _, decision = _select(16, _PYPI, backend="aiter")
        pool = anyattn.kv.create_pool(decision, num_slots=16 * decision.kv.page_size)
        table = anyattn.kv.RequestTable(max_requests=4, max_context=256, device="cpu")
        table.req_to_token[0] = pool.page_size + torch.arange(256)
        backend = anyattn.create_backend(decision, pool, table)
        for prefix, new, method in ((0, 60, MLAMethod.MATERIALISED), (190, 2, MLAMethod.ABSORBED)):
            slots = pool.page_size + torch.arange(prefix, prefix + new)
            plan = backend.init_forward_metadata(anyattn.ForwardBatch.extend([0], [prefix], [new], slots))
            assert plan.mla_method is method
