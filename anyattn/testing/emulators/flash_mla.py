"""Stand-in for FlashMLA: `flash_mla` of sgl-flash-mla 1.0.0 and
`sgl_kernel.flash_mla` of sglang-kernel 0.4.10.

From `flash_mla/flash_mla_interface.py` and the C++ interfaces `dense_decode.h` and
`dense_fp8_python_api.cpp`: dense decode on SM90 alone. What is sparse isn't emulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError, current_host, module_tree
from anyattn.testing.emulators.softmax import attend, band, check, fingerprint, gather

__all__ = ["FlashMLASchedMeta", "modules"]

Tensor = torch.Tensor
_PAGE = 64
_SMS = 132
_META = 8  # int32 of one row of the schedule
_FP8 = torch.float8_e4m3fn


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Filled by the first kernel call; belongs to the shapes and lengths of that call."""

    @dataclasses.dataclass
    class Config:
        """Shapes that a sparse call checks again."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules: `flash_mla` of sgl-flash-mla and `sgl_kernel.flash_mla`."""
    own = {
        "FlashMLASchedMeta": FlashMLASchedMeta,
        "get_mla_metadata": get_mla_metadata,
        "get_mla_decoding_metadata": get_mla_decoding_metadata,
        "flash_mla_with_kvcache": flash_mla_with_kvcache,
        "has_legacy": has_legacy,
    }
    sglang = {
        "FlashMLASchedMeta": FlashMLASchedMeta,
        "get_mla_metadata": _sgl_get_mla_metadata,
        "flash_mla_with_kvcache": _sgl_with_kvcache,
    }
    public = {name: value for name, value in own.items() if name != "FlashMLASchedMeta"}
    return module_tree(
        {
            "flash_mla": {"__version__": "1.0.0", **public},
            "flash_mla.flash_mla_interface": own,
            "sgl_kernel": {"__version__": "0.4.10"},
            "sgl_kernel.flash_mla": sglang,
        }
    )


def has_legacy() -> bool:
    """The older kernels, dense decode among them, are in this build."""
    return True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """An empty object, whatever is given."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(
    seqlens_k: Tensor, num_q_tokens_per_head_k: int, h_k: int, h_q: int | None = None,
    is_fp8_kvcache: bool = False, topk: int | None = None, use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(schedule `[parts, 8]`, splits `[B + 1]`), int32; dense fp8 has no other way."""
    dense_fp8 = is_fp8_kvcache and topk is None
    assert use_legacy or not dense_fp8, "dense fp8 decoding exists only on the legacy side"
    if topk is not None:
        raise EmulationError("sparse attention isn't emulated", asked=topk, allowed="topk=None")
    return _schedule(seqlens_k, num_q_tokens_per_head_k, h_k)


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta, num_splits: None = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool | None = None, indices: Tensor | None = None,
    attn_sink: Tensor | None = None, extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None, topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None, enable_batch_invariant: bool = False, use_legacy: bool = False,
    kv_format: str | None = None, descale_q: Tensor | None = None, descale_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Dense decode: out `[B, Sq, Hq, 512]`, natural-log LSE `[B, Hq, Sq]` (+inf for a request without keys).

    `attn_sink` and `enable_batch_invariant` are the sparse kernels': dense decode drops them.

    Raises:
        AssertionError, RuntimeError: what the library refuses.
        EmulationError: sparse attention.
    """
    meta = tile_scheduler_metadata
    assert isinstance(meta, FlashMLASchedMeta), "tile_scheduler_metadata must be of type FlashMLASchedMeta"
    assert num_splits is None, "num_splits must be None"
    if indices is not None:
        raise EmulationError("sparse attention isn't emulated", asked="indices", allowed="indices=None")
    assert use_legacy, "Sparse attention is required: pass use_legacy=True to reach dense decoding"
    assert kv_format is None, "kv_format does not apply to dense decoding"
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if is_fp8_kvcache:
        assert meta.tile_scheduler_metadata is not None, (
            "dense fp8 decoding needs metadata from get_mla_decoding_metadata(..., "
            "is_fp8_kvcache=True, use_legacy=True) before the first call"
        )
        return _dense_fp8(
            q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal,
            (meta.tile_scheduler_metadata, meta.num_splits), descale_q, descale_k,
        )  # fmt: skip
    assert descale_q is None, "descale_q/descale_k apply to the dense fp8 path only"
    assert descale_k is None, "descale_q/descale_k apply to the dense fp8 path only"
    return _dense(q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal, meta)


# --- sglang-kernel's copy --------------------------------------------------------------------------------


def _sgl_get_mla_metadata(
    cache_seqlens: Tensor | None = None, num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None, num_heads_q: int | None = None, is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    assert num_q_tokens_per_head_k is not None
    assert num_heads_k is not None
    if topk is not None:
        raise EmulationError("sparse attention isn't emulated", asked=topk, allowed="topk=None")
    return _schedule(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


def _sgl_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: Tensor | FlashMLASchedMeta, num_splits: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, descale_q: Tensor | None = None,
    descale_k: Tensor | None = None, is_fp8_kvcache: bool = False, indices: Tensor | None = None,
    attn_sink: Tensor | None = None, extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None, topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None, kv_format: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """sglang-kernel: descales stand before `is_fp8_kvcache`, metadata are tensors or an object."""
    if indices is not None:
        raise EmulationError("sparse attention isn't emulated", asked="indices", allowed="indices=None")
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        if is_fp8_kvcache or q.dtype == _FP8:
            raise EmulationError("dense fp8 with an object isn't emulated", allowed="tensors")
        return _dense(
            q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal, tile_scheduler_metadata
        )
    assert num_splits is not None
    assert (descale_q is None) == (descale_k is None), "descale_q and descale_k should be both or neither"
    schedule = (tile_scheduler_metadata, num_splits)
    if q.element_size() == 1:
        return _dense_fp8(
            q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal, schedule, descale_q, descale_k
        )
    meta = FlashMLASchedMeta(tile_scheduler_metadata=schedule[0], num_splits=schedule[1])
    return _dense(q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal, meta)


# --- the kernels -------------------------------------------------------------------------------------------


def _parts(rows_per_kv_head: int, kv_heads: int) -> int:
    return max(_SMS // kv_heads // -(-rows_per_kv_head // 64), 1)


def _schedule(lengths: Tensor, rows_per_kv_head: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Tensors of the library's shapes; they hold marks of the lengths, by which a stale schedule shows."""
    check(lengths.dtype == torch.int32, "seqlens_k must have dtype int32")
    schedule = torch.zeros(_parts(rows_per_kv_head, kv_heads), _META, dtype=torch.int32)
    schedule[0, 0] = fingerprint(lengths)
    return schedule, torch.zeros(lengths.shape[0] + 1, dtype=torch.int32)


def _dense(
    q: Tensor, cache: Tensor, v_dim: int, lengths: Any, table: Any, scale: float, causal: bool,
    meta: FlashMLASchedMeta,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check(q.dtype in (torch.bfloat16, torch.float16), "q must have dtype bfloat16 or float16")
    check(q.shape[-1] in (576, 512), "Only head_size_k == 576 or 512 is supported")
    rows = q.shape[1] * q.shape[2] // cache.shape[2]
    if meta.tile_scheduler_metadata is None:
        _check(q, cache, v_dim, lengths, table)
        meta.tile_scheduler_metadata, meta.num_splits = _schedule(lengths, rows, cache.shape[2])
    schedule = (meta.tile_scheduler_metadata, meta.num_splits)
    wanted = (_parts(rows, cache.shape[2]), _META)
    check(tuple(schedule[0].shape) == wanted, "tile_scheduler_metadata must have shape (num_sm_parts, 8)")
    return _decode(q, cache, v_dim, lengths, table, (scale, 1.0), causal, schedule)


def _dense_fp8(
    q: Tensor, cache: Tensor, v_dim: int, lengths: Any, table: Any, scale: float, causal: bool,
    schedule: tuple[Tensor, Tensor | None], descale_q: Tensor | None, descale_k: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check(q.dtype == _FP8, "q must have dtype float8_e4m3fn")
    check(q.shape[-1] == 576, "Only head_size_k == 576 is supported")
    if descale_q is None or descale_k is None:
        raise RuntimeError("descale is required when input dtype is fp8")
    for name, x in (("descale_q", descale_q), ("descale_k", descale_k)):
        check(x.dtype == torch.float32, f"{name} must have dtype float32")
        check(tuple(x.shape) == (1,), f"{name} must have shape (1)")
    k_scale = float(descale_k)
    scales = (scale * float(descale_q) * k_scale, k_scale)
    return _decode(q, cache, v_dim, lengths, table, scales, causal, schedule)


def _check(q: Tensor, cache: Tensor, v_dim: int, lengths: Any, table: Any) -> None:
    host = current_host() or "cuda:sm90"
    check(host.startswith("cuda:sm90"), "Dense decode MLA is only supported on SM90a architecture")
    check(isinstance(lengths, Tensor), "cache_seqlens must be a tensor")
    check(isinstance(table, Tensor), "block_table must be a tensor")
    check(cache.dtype == q.dtype, "query and key must have the same dtype")
    check(lengths.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(table.dtype == torch.int32, "block_table must have dtype torch.int32")
    check(q.stride(-1) == 1, "q must have contiguous last dimension")
    check(cache.stride(-1) == 1, "kcache must have contiguous last dimension")
    check(lengths.is_contiguous(), "seqlens_k must be contiguous")
    check(table.stride(-1) == 1, "block_table must have contiguous last dimension")
    check(v_dim == 512, "Only head_size_v == 512 is supported")
    check(q.dim() == 4, "q must have shape (batch_size, seqlen_q, num_heads, head_size_k)")
    check(cache.dim() == 4, "kcache must have shape (num_blocks, page_block_size, num_heads_k, head_size_k)")
    check(cache.shape[1] == _PAGE, "Currently page_block_size must be 64")
    check(cache.shape[3] == q.shape[3], "kcache must have the head size of q")
    check(q.shape[0] > 0, "batch size must be positive")
    check(
        q.shape[2] % cache.shape[2] == 0, "Number of heads in key/value must divide number of heads in query"
    )
    check(tuple(lengths.shape) == (q.shape[0],), "seqlens_k must have shape (batch_size)")
    check(table.shape[0] == q.shape[0], "block_table must have shape (batch_size, max_num_blocks_per_seq)")


def _decode(
    q: Tensor, cache: Tensor, v_dim: int, lengths: Any, table: Any, scales: tuple[float, float],
    causal: bool, schedule: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(q, cache, v_dim, lengths, table)
    batch, rows, heads, _ = q.shape
    splits = schedule[1]
    check(
        splits is not None and tuple(splits.shape) == (batch + 1,),
        "num_splits must have shape (batch_size+1)",
    )
    out = torch.full((batch, rows, heads, v_dim), math.nan, dtype=torch.float64)
    lse = torch.full((batch, rows, heads), math.nan, dtype=torch.float64)
    if int(schedule[0][0, 0]) == fingerprint(lengths):
        for index, length in enumerate(lengths.tolist()):
            keys = gather(cache, table[index], length).double()
            seen = band(rows, length, -1, 0 if causal and rows > 1 else -1)
            values = keys[:, :, :v_dim] * scales[1]
            out[index], lse[index] = attend(q[index], keys, values, seen, scale=scales[0])
        lse[torch.isneginf(lse)] = math.inf  # what these kernels write for a row without keys
    dtype = torch.bfloat16 if q.dtype == _FP8 else q.dtype
    return out.to(dtype), lse.transpose(1, 2).to(torch.float32).contiguous()
