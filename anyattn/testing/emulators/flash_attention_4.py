"""Stand-in for FlashAttention-4, `flash_attn.cute` of flash-attn-4 4.0.0b36.

From `flash_attn/cute/interface.py`: what each chip takes, tiles, whole pages by TMA, shapes of the LSE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError, current_host, module_tree
from anyattn.testing.emulators.softmax import attend, band, gather, offsets

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "modules"]

Tensor = torch.Tensor
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALVES = (torch.float16, torch.bfloat16)


def modules() -> Mapping[str, ModuleType]:
    """Fresh modules. `flash_attn` itself is an empty namespace, `__version__` reads 0.0.0 as in the wheel."""
    functions = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
    return module_tree(
        {
            "flash_attn.cute": {"__version__": "0.0.0", **functions},
            "flash_attn.cute.interface": functions,
            "cutlass": {},
        }
    )


def flash_attn_func(
    q: Any, k: Any, v: Any, qv: Any = None, gather_kv_indices: Any = None, softmax_scale: Any = None,
    causal: Any = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: Any = 0.0,
    num_splits: Any = 1, pack_gqa: Any = None, deterministic: Any = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, aux_tensors: Any = None, aux_scalars: Any = None,
    block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None, return_lse: Any = False,
    gather_bwd_recompute_p: Any = False, gather_bwd_token_chunk: Any = None,
) -> Any:  # fmt: skip
    """Dense batches, `[B, S, H, D]`: not what a paged caller uses."""
    raise EmulationError("flash_attn_func isn't emulated", asked="dense batches", allowed="varlen")


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, qv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None, max_seqlen_k: Any = None, min_seqlen_k: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, gather_kv_indices: Any = None, page_table: Any = None, softmax_scale: Any = None,
    causal: Any = False, window_size: Any = (None, None), learnable_sink: Any = None, softcap: Any = 0.0,
    num_splits: Any = 1, pack_gqa: Any = None, deterministic: Any = False, score_mod: Any = None,
    score_mod_bwd: Any = None, mask_mod: Any = None, block_sparse_tensors: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, return_lse: Any = False,
    scheduler_metadata: Any = None, seqlen_k_per_split: Any = None, disable_scheduler_metadata: Any = False,
    gather_bwd_recompute_p: Any = False, gather_bwd_token_chunk: Any = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Always a pair: out `[T, Hq, Dv]` and the natural-log LSE `[Hq, T]` (with `qv` `[T, Hq]`), which is None
    unless `return_lse`.

    Raises:
        AssertionError: what the library refuses.
        EmulationError: what it takes and this stand-in doesn't know.
    """
    for name, value in (
        ("gather_kv_indices", gather_kv_indices), ("score_mod", score_mod), ("mask_mod", mask_mod),
        ("block_sparse_tensors", block_sparse_tensors), ("seqused_q", seqused_q),
        ("scheduler_metadata", scheduler_metadata),
    ):  # fmt: skip
        if value is not None:
            raise EmulationError(f"{name} isn't emulated", asked=name, allowed="left out")
    if k is v and v.shape[-1] == 512 and qv is None:
        raise EmulationError("attention over latents without a rope part isn't emulated", asked="k is v")
    chip = _chip()
    window = _window(causal, window_size)
    _check(q, k, v, qv, chip, num_splits, softcap, window)
    _check_lengths(q, k, v, page_table, cu_seqlens_q, cu_seqlens_k, seqused_k)
    _check_sink(learnable_sink, q.shape[-2])
    if cu_seqlens_q is None:
        raise EmulationError("dense queries aren't emulated", asked="cu_seqlens_q=None", allowed="offsets")
    sizes = q.shape[-1] + (0 if qv is None else qv.shape[-1])
    scale = sizes**-0.5 if softmax_scale is None else float(softmax_scale)
    whole = page_table is not None and k.shape[1] == _tile_n(q, v, chip, window)
    out = torch.full((q.shape[0], q.shape[1], v.shape[-1]), math.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64)
    for index, (start, stop) in enumerate(offsets(cu_seqlens_q)):
        keys, values, length = _keys(k, v, page_table, cu_seqlens_k, seqused_k, index, whole)
        own, both = q[start:stop].double(), keys.double()
        if qv is not None:
            own, both = torch.cat([own, qv[start:stop].double()], -1), torch.cat([both, values.double()], -1)
        seen = band(stop - start, keys.shape[0], *window, last=length - 1)
        seen[:, length:] = False
        out[start:stop], lse[start:stop] = attend(
            own, both, values, seen, scale=scale, cap=softcap, sinks=learnable_sink, poisoned=whole
        )
        if max_seqlen_q is not None:  # a grid of the caller's bound
            out[start + int(max_seqlen_q) : stop] = math.nan
    lse32 = lse.to(torch.float32)
    return out.to(q.dtype), ((lse32 if qv is not None else lse32.T.contiguous()) if return_lse else None)


def _chip() -> int:
    """SM number of the emulated host, 90 outside of emulation."""
    digits = "".join(
        c for c in (current_host() or "cuda:sm90").partition(":sm")[2] if c.isdigit() or c in "+-"
    )
    return int("".join(c for c in digits.partition("+")[0].partition("-")[0]) or 90)


def _window(causal: bool, window: tuple[int | None, int | None]) -> tuple[int, int]:
    """(left, right), -1 unbounded. A single negative bound isn't "none" to the library: it hides all keys on
    that side up to the query's own."""
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    right = 0 if causal else right
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise EmulationError(
            "a window with one negative bound", asked=window, allowed="None for no bound", hint="(left, None)"
        )
    return -1 if left is None else left, -1 if right is None else right


def _check(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, chip: int, splits: int, softcap: float,
    window: tuple[int, int],
) -> None:  # fmt: skip
    family = chip // 10
    assert family in (8, 9, 10, 11, 12), "Unsupported compute capability. Supported: 8.x to 12.x"
    assert v.dtype in (*_HALVES, *_FP8), "inputs must be float16, bfloat16, fp8 e4m3fn, or fp8 e5m2"
    assert q.dtype == k.dtype == v.dtype, "q, k, v, and qv must have the same dtype"
    assert v.dtype not in _FP8 or family == 10, "FP8 is only supported on SM100 (compute capability 10.x)"
    assert q.shape[-2] % v.shape[-2] == 0, "num_head must be divisible by num_head_kv"
    if family not in (8, 12):
        _check_sizes(q.shape[-1], v.shape[-1], family, 16 // v.element_size())
    assert splits <= 1 or family in (10, 11), "SplitKV not supported on this architecture"
    assert splits <= 1 or q.shape[-1] == v.shape[-1] or qv is not None, "SplitKV with unequal head sizes"
    if qv is not None:
        assert family in (10, 11), "only support Blackwell arch with qv"
        assert qv.shape == (*q.shape[:-1], v.shape[-1]), "qv must have the shape of q but for its head size"
        assert (q.shape[-1], v.shape[-1]) == (64, 512), "qv goes with head sizes 64 and 512"
        local = window[0] >= 0 or window[1] > 0
        assert not local, "local not yet supported with qv"
        assert not softcap, "softcap with qv"


def _check_sizes(head_dim: int, v_dim: int, family: int, alignment: int) -> None:
    if family == 9:
        fits = 8 <= head_dim <= 256 and 8 <= v_dim <= 256
    else:
        standard = 8 <= head_dim <= 128 and 8 <= v_dim <= 128
        absorbed = v_dim == 512 and head_dim in (64, 512)
        fits = standard or absorbed or (head_dim, v_dim) in ((192, 128), (256, 256))
    fits = fits and head_dim % alignment == 0 and v_dim % alignment == 0
    assert fits, f"(head_dim, head_dim_v)=({head_dim}, {v_dim}) is not supported on SM{family}0"


def _check_lengths(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    seqused_k: Tensor | None,
) -> None:  # fmt: skip
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    for x in (cu_q, cu_k, seqused_k):
        assert x is None or x.dtype == torch.int32, "cu_seqlens_q, cu_seqlens_k, seqused_k must be int32"
        assert x is None or x.stride(0) == 1, "cu_seqlens_q, cu_seqlens_k, seqused_k must be contiguous"
    assert cu_k is None or cu_k.shape == (batch + 1,), "cu_seqlens_k must have shape (batch_size + 1,)"
    assert seqused_k is None or seqused_k.shape == (batch,), "seqused_k must have shape (batch_size,)"
    assert k.shape[:-1] == v.shape[:-1], "k and v must have the same shape but for the head size"
    if table is None:
        return
    family = _chip() // 10
    assert family not in (8, 12), f"paged KV not supported on SM {family}.0"
    assert cu_k is None, "page_table is not supported with cu_seqlens_k"
    assert table.dtype == torch.int32, "page_table must be int32"
    assert table.shape[0] == batch, "page_table must have shape (batch_size, max_num_pages_per_seq)"


def _check_sink(sink: Tensor | None, heads: int) -> None:
    if sink is not None:
        assert sink.shape == (heads,), "learnable_sink must have shape (num_head,)"
        assert sink.dtype in (*_HALVES, torch.float32), "learnable_sink must be float16, bfloat16, or float32"


def _tile_n(q: Tensor, v: Tensor, chip: int, window: tuple[int, int]) -> int:
    """Keys of a tile; a page of just that size is loaded by TMA, whole."""
    if chip // 10 != 9:
        return 128
    size, local = q.shape[-1], window[0] >= 0 or window[1] > 0
    masked = local or window[1] == 0
    if size <= 64 or 96 < size <= 128:
        return 128
    if size <= 96:
        return 128 if masked else 144
    if size <= 192:
        return 96 if local else (128 if v.shape[-1] <= 128 else 112)
    return 64 if local else 80


def _keys(
    k: Tensor, v: Tensor, table: Tensor | None, cu_k: Tensor | None, seqused_k: Tensor | None, index: int,
    whole: bool,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """(keys, values, length) of a request; both run to the end of the page where pages are loaded whole."""
    if table is not None:
        row, page = table[index], k.shape[1]
        length = row.shape[0] * page if seqused_k is None else int(seqused_k[index])
        stop = -(-length // page) * page if whole else length
        return gather(k, row, stop), gather(v, row, stop), length
    if cu_k is None:
        raise EmulationError("dense keys aren't emulated", asked="cu_seqlens_k=None", allowed="offsets")
    start, end = offsets(cu_k)[index]
    end = end if seqused_k is None else start + int(seqused_k[index])
    return k[start:end], v[start:end], end - start
