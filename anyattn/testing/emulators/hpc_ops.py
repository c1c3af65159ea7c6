"""Stand-in for Tencent's hpc-ops (commit 6e2eced), module `hpc`: attention for head size 128 on SM90.

From `hpc/attention.py`, `src/attention/entry.cc` and `src/attention/decode/assign_task.cu`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from types import ModuleType
from typing import Any

import torch

from anyattn.testing.emulators.modules import module_tree
from anyattn.testing.emulators.softmax import attend, band, check, gather, offsets

__all__ = ["QuantType", "modules"]

Tensor = torch.Tensor
_D = 128
_SCALE = _D**-0.5
_SMS = 132
_CTAS_PER_SM = (4, 3, 3, 2, 2)
_FP8 = torch.float8_e4m3fn
_TASK = 12  # int32 of one task


class QuantType(Enum):
    """Which tensors have scales per token, head or tensor; attention takes the first two."""

    QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD = 0
    QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR = 1
    QPERTENSOR_KPERTENSOR_VPERTENSOR = 2
    QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD_QKHADAMARD = 3

    def __repr__(self) -> str:
        """As its source names it, so that signatures can be read."""
        return str(self)


_PER_TENSOR = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules: everything public at top level, as the library exports it."""
    functions = (
        attention_decode_bf16,
        attention_decode_fp8,
        attention_with_kvcache_prefill_bf16,
        attention_with_kvcache_prefill_fp8,
        get_attention_decode_task_workspace,
        assign_attention_decode_task,
    )
    public: dict[str, Any] = {f.__name__: f for f in functions}
    public["QuantType"] = QuantType
    return module_tree({"hpc": {"__version__": "0.0.1.dev0+g6e2eced", **public}, "hpc.attention": public})


# --- decode ------------------------------------------------------------------------------------------------


def attention_decode_bf16(
    q: Tensor, kcache: Tensor, vcache: Tensor, block_ids: Tensor, num_seq_kvcache: Tensor, mtp: int = 0,
    new_kv_included: bool = False, splitk: bool = True, task_map: Tensor | None = None,
    split_flag: Tensor | None = None, output: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """bf16 `[B * (mtp + 1), Hq, 128]`. With a task map lengths come from the map alone, and `output` is
    written as if contiguous whatever its strides."""
    _check_decode(q, kcache, block_ids, num_seq_kvcache, mtp, (16, 32, 64))
    if task_map is not None:
        check(task_map.is_contiguous(), "task_map tensor must be contiguous")
        check(task_map.dtype in (torch.int8, torch.int32), "task_map dtype must be int8 or int32")
        check(splitk, "attention_decode_bf16: splitk must be true with a task_map.")
        lengths = _assigned(task_map, num_seq_kvcache.shape[0], mtp + 1, kcache.shape[2])
    else:
        check(mtp in (0, 1, 2), "we only support mtp 0, 1, 2.")
        check(kcache.shape[1] in (32, 64), "kvcache paged blocksize must be 32 and 64.")
        check(split_flag is None or not bool(split_flag.any()), "a used split_flag hangs the kernel")
        lengths = _totals(num_seq_kvcache, mtp + 1, new_kv_included)
    ones = torch.ones(q.shape[:2], dtype=torch.float64)
    halves = (_as_bf16(q), _as_bf16(kcache), _as_bf16(vcache))
    found = _decode(*halves, block_ids, lengths, mtp + 1, (ones, torch.ones(1), torch.ones(1)))
    return _written(found, output, contiguous=task_map is not None)


def attention_decode_fp8(
    q: Tensor, kcache: Tensor, vcache: Tensor, block_ids: Tensor, num_seq_kvcache: Tensor, qscale: Tensor,
    kscale: Tensor, vscale: Tensor, mtp: int = 0, new_kv_included: bool = False,
    quant_type: QuantType = _PER_TENSOR, splitk: bool = True, task_map: Tensor | None = None,
    split_flag: Tensor | None = None, output: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q is fp8 too; `qscale [B * (mtp + 1), Hq]`, `kscale [1]`, `vscale [1]`, all multiply."""
    check(q.dtype == _FP8, "q dtype must be fp8_e4m3fn")
    check(kcache.dtype.itemsize == 1, "kcache tensor element type size must be fp8_e4m3")
    check(vcache.dtype.itemsize == 1, "vcache tensor element type size must be fp8_e4m3")
    check(mtp in (0, 1, 2, 3), "we only support mtp 0, 1, 2, 3.")
    _check_decode(q, kcache, block_ids, num_seq_kvcache, mtp, (64,))
    check(qscale.dtype == torch.float32, "expected scalar type Float for qscale")
    check(vscale.dtype == torch.float32, "expected scalar type Float for vscale")
    _check_quant(quant_type)
    if task_map is not None and splitk:
        lengths = _assigned(task_map, num_seq_kvcache.shape[0], mtp + 1, kcache.shape[2])
    else:
        lengths = _totals(num_seq_kvcache, mtp + 1, new_kv_included)
    scales = (qscale.double(), _first(kscale), _first(vscale))
    found = _decode(q, kcache, vcache, block_ids, lengths, mtp + 1, scales)
    return _written(found, output, contiguous=False)


def get_attention_decode_task_workspace(
    max_num_batch: int, max_seqlen: int, num_head_kv: int, min_process_len: int = 512
) -> Tensor:
    """int8 workspace of the library's size; its header names KV heads and the largest batch."""
    tiles = max_num_batch * num_head_kv * (-(-max_seqlen // 64))
    most = 0
    for per_sm in (4, 3, 2, 1):
        ctas = _SMS * per_sm
        most = max(most, (max(-(-tiles // ctas), min_process_len // 64) + 1) * ctas + 1)
    task_bytes = 4 * _TASK
    chunks = -(-max_num_batch * num_head_kv * 4 // task_bytes) * task_bytes
    flags = -(-_SMS * 4 // _TASK) * _TASK * 4
    needed = most * task_bytes + chunks
    workspace = torch.zeros(needed + 2 * flags, dtype=torch.int8)
    workspace.view(torch.int32)[2:5] = torch.tensor([num_head_kv, max_num_batch, needed], dtype=torch.int32)
    return workspace


def assign_attention_decode_task(
    num_seq_kvcache: Tensor, task_map: Tensor, num_head_kv: int, mtp: int, new_kv_included: bool,
    min_process_len: int = 512,
) -> Tensor:  # fmt: skip
    """Writes the lengths of a step into the map. Here `mtp` is query tokens per request, 1 or more."""
    batch = num_seq_kvcache.shape[0]
    check(batch <= 2048, "assign_attention_decode_task_cuda only support batch_size <= 2048")
    words = task_map.view(torch.int32)
    fits = int(words[2]) == num_head_kv and batch <= int(words[3]) and 1 <= mtp <= len(_CTAS_PER_SM)
    ctas = _SMS * _CTAS_PER_SM[mtp - 1] if fits else 0  # else the library reads beside its tables
    words[0:2] = torch.tensor([1, ctas], dtype=torch.int32)
    words[_TASK : _TASK + 3] = torch.tensor([batch, mtp, int(fits)], dtype=torch.int32)
    words[2 * _TASK : 2 * _TASK + batch] = _totals(num_seq_kvcache, mtp, new_kv_included).to(torch.int32)
    return task_map


def _assigned(task_map: Tensor, batch: int, rows: int, kv_heads: int) -> Tensor:
    """Lengths that the map holds; -1 where it was made for another step (the kernel would read garbage)."""
    words = task_map.view(torch.int32)
    was = [int(n) for n in words[_TASK : _TASK + 3]]
    if was != [batch, rows, 1] or int(words[2]) != kv_heads:
        return torch.full((batch,), -1)
    return words[2 * _TASK : 2 * _TASK + batch].clone()


def _totals(given: Tensor, rows: int, included: bool) -> Tensor:
    return given if included else given + rows


def _check_decode(
    q: Tensor, kcache: Tensor, block_ids: Tensor, lengths: Tensor, mtp: int, pages: tuple[int, ...]
) -> None:
    check(block_ids.is_contiguous(), "block_ids tensor must be contiguous")
    check(lengths.is_contiguous(), "num_seq_kvcache tensor must be contiguous")
    check(block_ids.dtype == torch.int32, "block_ids dtype must be int32")
    check(lengths.dtype == torch.int32, "num_seq_kvcache dtype must be int32")
    check(mtp in (0, 1, 2, 3, 4), "we only support mtp 0, 1, 2, 3, 4.")
    check(q.shape[0] // lengths.shape[0] == mtp + 1, "every request num_seq_q must be mtp + 1")
    check(q.shape[2] == _D, "we only support head dim 128.")
    check(kcache.shape[1] in pages, f"kvcache paged blocksize must be one of {pages}.")
    check(q.shape[1] // kcache.shape[2] in (4, 8), "we only support num_head_q / num_head_k == 4 or 8.")


def _decode(
    q: Tensor, kcache: Tensor, vcache: Tensor, table: Tensor, lengths: Tensor, rows: int,
    scales: tuple[Tensor, Tensor, Tensor],
) -> Tensor:  # fmt: skip
    found = torch.full(q.shape, math.nan, dtype=torch.float64)
    for index, length in enumerate(int(n) for n in lengths.tolist()):
        if length < 0:
            continue
        own = slice(index * rows, (index + 1) * rows)
        found[own] = _request(q[own], kcache, vcache, table[index], length, scales[0][own], *scales[1:])
    return found


# --- prefill -----------------------------------------------------------------------------------------------


def attention_with_kvcache_prefill_bf16(
    q: Tensor, kcache: Tensor, vcache: Tensor, cu_seqlens_q: Tensor, block_ids: Tensor,
    seqlens_kvcache: Tensor, max_seqlens_q: int, output: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """bf16 `[T, Hq, 128]`. `seqlens_kvcache` are *total* lengths, whatever its documentation says."""
    ones = torch.ones(q.shape[:2], dtype=torch.float64)
    halves = (_as_bf16(q), _as_bf16(kcache), _as_bf16(vcache))
    scales = (ones, torch.ones(1), torch.ones(1))
    return _prefill(*halves, cu_seqlens_q, block_ids, seqlens_kvcache, max_seqlens_q, output, scales)


def attention_with_kvcache_prefill_fp8(
    q: Tensor, kcache: Tensor, vcache: Tensor, qscale: Tensor, kscale: Tensor, vscale: Tensor,
    cu_seqlens_q: Tensor, block_ids: Tensor, seqlens_kvcache: Tensor, max_seqlens_q: int,
    quant_type: QuantType = _PER_TENSOR, output: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`qscale [B, Hq, pad]` by request and row of the request; `kscale [1]`, `vscale [1]`."""
    for name, x in (("q", q), ("kcache", kcache), ("vcache", vcache)):
        check(x.dtype == _FP8, f"{name} dtype must be float8_e4m3fn")
    _check_quant(quant_type)
    per_row = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    for index, (start, stop) in enumerate(offsets(cu_seqlens_q)):
        per_row[start:stop] = qscale[index, :, : stop - start].T.double()
    scales = (per_row, _first(kscale), _first(vscale))
    return _prefill(
        q, kcache, vcache, cu_seqlens_q, block_ids, seqlens_kvcache, max_seqlens_q, output, scales
    )


def _prefill(
    q: Tensor, kcache: Tensor, vcache: Tensor, cu_q: Tensor, table: Tensor, lengths: Tensor, max_q: int,
    output: Tensor | None, scales: tuple[Tensor, Tensor, Tensor],
) -> Tensor:  # fmt: skip
    check(q.shape[2] == _D == vcache.shape[3], f"expected dim_qk=128 and dim_v=128, got {q.shape[2]}")
    if output is not None:
        check(output.dtype == torch.bfloat16, "output dtype must be bfloat16")
        check(output.is_contiguous(), "output tensor must be contiguous")
        check(output.shape == q.shape, "output must have shape [total_seq_q, num_head_q, num_dim_v]")
    found = torch.full(q.shape, math.nan, dtype=torch.float64)
    if kcache.shape[1] in (32, 64):  # another page launches nothing
        for index, (start, stop) in enumerate(offsets(cu_q)):
            stop = min(stop, start + int(max_q))
            own = slice(start, stop)
            if stop > start:
                found[own] = _request(
                    q[own], kcache, vcache, table[index], int(lengths[index]), scales[0][own], *scales[1:],
                    rows=offsets(cu_q)[index][1] - start,
                )  # fmt: skip
    return _written(found, output, contiguous=False)


# --- shared ------------------------------------------------------------------------------------------------


def _request(
    q: Tensor, kcache: Tensor, vcache: Tensor, row: Tensor, length: int, q_scale: Tensor, k_scale: Tensor,
    v_scale: Tensor, rows: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal, bottom-right; whole pages are multiplied, so the tail of the last one must be finite."""
    page = kcache.shape[1]
    whole = -(-length // page) * page
    keys, values = gather(kcache, row, whole).double(), gather(vcache, row, whole).double()
    count = q.shape[0] if rows is None else rows
    seen = band(count, whole, -1, 0, last=length - 1)[: q.shape[0]]
    scaled = q.double() * q_scale[:, :, None]
    out, _ = attend(scaled, keys * k_scale, values * v_scale, seen, scale=_SCALE, poisoned=True)
    return out


def _check_quant(quant_type: QuantType) -> None:
    check(quant_type.value in (0, 1), "quant_type only support 0/1")
    if quant_type is not _PER_TENSOR:
        raise NotImplementedError("scales of K inside the cache aren't emulated")


def _first(scale: Tensor) -> Tensor:
    """The kernel reads one number."""
    return scale.reshape(-1)[:1].double()


def _as_bf16(x: Tensor) -> Tensor:
    """No dtype is checked: two bytes of anything are read as bfloat16."""
    return x if x.dtype == torch.bfloat16 else x.view(torch.bfloat16)


def _written(found: Tensor, output: Tensor | None, *, contiguous: bool) -> Tensor:
    done = found.to(torch.bfloat16)
    if output is None:
        return done
    if contiguous and not output.is_contiguous():
        flat = output.as_strided((done.numel(),), (1,))
        flat.copy_(done.reshape(-1))
        return output
    return output.copy_(done)
