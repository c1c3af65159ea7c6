"""What the kernels of wave-lang's two attention templates compute; compile-time constants are frozen in."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.testing.emulators.modules import EmulationError
from anyattn.testing.emulators.softmax import attend, band, check, offsets
from anyattn.testing.emulators.wave_types import GenericDot, MMAType

__all__ = [
    "AttentionShape",
    "Kernel",
    "get_extend_attention_kernel",
    "get_paged_decode_attention_kernels",
    "get_paged_decode_intermediate_arrays_shapes",
    "paged_decode_attention_shape",
]

Tensor = torch.Tensor
HALVES = (torch.float16, torch.bfloat16)
_LOG2E = 1.44269504089
_EMPTY = -1e6  # the largest score of a split without keys
_DECODE = ((1, 4, 7, 8, 16, 24), (64, 80, 128, 256))
_EXTEND = ((1, 4, 8), (64, 80, 128))

paged_decode_attention_shape = namedtuple(
    "paged_decode_attention_shape",
    ["num_query_heads", "num_kv_heads", "head_size", "head_size_kv", "block_size", "num_seqs"],
)


@dataclass(frozen=True)
class AttentionShape:
    """`templates.attention_common.AttentionShape`."""

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    head_size_kv: int
    batch_size: int | None = None
    num_seqs: int | None = None
    max_seq_len: int | None = None
    total_seq_len: int | None = None
    context_len: int | None = None
    fixed_seq_len_prefix: int | None = None
    fixed_seq_len_extend: int | None = None
    query_seq_len: int | None = None
    kv_seq_len: int | None = None
    block_size: int | None = None


@dataclass(frozen=True)
class Kernel:
    """A traced kernel: symbols that need a value, symbols read from shapes, numbers of its arguments."""

    name: str
    tensors: int
    numbers: int
    symbols: tuple[str, ...]
    dynamic: tuple[str, ...]
    run: Callable[[Sequence[Tensor], Sequence[int]], None]


@dataclass(frozen=True)
class _Constants:
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    read: torch.dtype
    written: torch.dtype
    scale: float
    cap: float


def _constants(
    shape: Any, read: torch.dtype, written: torch.dtype, scale: float | None, cap: float,
    compiled: tuple[tuple[int, ...], tuple[int, ...]],
) -> _Constants:  # fmt: skip
    if read not in HALVES:
        raise AssertionError(f"Unsupported input datatype: {read}")
    group = shape.num_query_heads // shape.num_kv_heads
    if group not in compiled[0] or shape.head_size not in compiled[1]:
        asked = f"groups of {group}, D {shape.head_size}"
        raise EmulationError("never compiled", asked=asked, allowed=f"groups {compiled[0]}, D {compiled[1]}")
    return _Constants(
        shape.num_query_heads, shape.num_kv_heads, shape.head_size, shape.head_size_kv, read, written,
        scale or math.sqrt(1.0 / shape.head_size), cap,
    )  # fmt: skip


def _check_heads(known: _Constants, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Shapes are strides of the compiled code; False where dtypes would be misread.

    Raises:
        RuntimeError: another shape.
    """
    check(q.shape[1:] == (known.heads, known.dim), f"illegal memory access: q {list(q.shape)}")
    check(k.shape[1:] == (known.kv_heads, known.dim), f"illegal memory access: k {list(k.shape)}")
    check(v.shape[1:] == (known.kv_heads, known.v_dim), f"illegal memory access: v {list(v.shape)}")
    return q.dtype == k.dtype == v.dtype == known.read


def _indices_fit(*tables: Tensor) -> bool:
    """Index tensors are read as int32 whatever they are."""
    return all(t.dtype == torch.int32 for t in tables)


def _slots(indices: Tensor, start: int, stop: int, cache: Tensor) -> Tensor:
    check(stop <= indices.shape[0], f"illegal memory access: {stop} of {indices.shape[0]} indices")
    found = indices[start:stop].long()
    inside = not found.numel() or (int(found.min()) >= 0 and int(found.max()) < cache.shape[0])
    check(inside, f"illegal memory access: slots outside of [0, {cache.shape[0]})")
    return found


# --- decode ------------------------------------------------------------------------------------------------


def get_paged_decode_intermediate_arrays_shapes(
    shape: Any, num_kv_splits: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits come first; both arrays are float32."""
    rows = (num_kv_splits, shape.num_seqs, shape.num_query_heads)
    return (*rows, shape.head_size_kv), rows


def get_paged_decode_attention_kernels(
    shape: Any, mfma_variant: tuple[Any, Any], num_kv_splits: int, input_dtype: torch.dtype = torch.float16,
    output_dtype: torch.dtype = torch.float16, layer_scaling: float | None = None, logit_cap: float = 0.0,
) -> tuple[Kernel, Kernel, dict[Any, Any], dict[Any, Any], list[str], list[str]]:  # fmt: skip
    """(phase 0, phase 1, their symbols' values, their dynamic symbols). `block_size` and `num_seqs` don't
    reach the kernels."""
    kind = GenericDot if shape.num_query_heads == shape.num_kv_heads else MMAType
    if not all(isinstance(m, kind) for m in mfma_variant):
        raise EmulationError("never compiled", asked=mfma_variant, allowed=f"two of {kind.__name__}")
    known = _constants(shape, input_dtype, output_dtype, layer_scaling, logit_cap, _DECODE)
    symbols = ("B", "N", "K1", "U", "BLOCK_U")

    def first(tensors: Sequence[Tensor], _: Sequence[int]) -> None:
        _phase_0(known, num_kv_splits, *tensors)

    def second(tensors: Sequence[Tensor], _: Sequence[int]) -> None:
        _phase_1(known, num_kv_splits, *tensors)

    values = {"B": known.heads, "N": known.v_dim, "K1": known.dim, "U": num_kv_splits, "BLOCK_U": 1}
    dynamic = ("K2", "N_KV", "S")
    phase_0 = Kernel("phase_0", 7, 0, symbols, dynamic, first)
    phase_1 = Kernel("phase_1", 4, 0, symbols, ("S",), second)
    return phase_0, phase_1, dict(values), dict(values), list(dynamic), ["S"]


def _fits(known: _Constants, splits: int, batch: int, logits: Tensor, largest: Tensor) -> bool:
    """Strides follow the batch of what the kernel reads it from, so workspaces have exactly that batch."""
    rows = (splits, batch, known.heads)
    return tuple(logits.shape) == (*rows, known.v_dim) and tuple(largest.shape) == rows


def _phase_0(
    known: _Constants, splits: int, q: Tensor, k: Tensor, v: Tensor, indptr: Tensor, indices: Tensor,
    logits: Tensor, largest: Tensor,
) -> None:  # fmt: skip
    """Normalised outputs and base-2 sums of each split of each request."""
    typed = _check_heads(known, q, k, v) and _indices_fit(indptr, indices)
    check(logits.dtype == largest.dtype == torch.float32, "illegal memory access: workspaces are float32")
    logits.fill_(math.nan)
    largest.fill_(math.nan)
    batch = q.shape[0]
    if not typed or not _fits(known, splits, batch, logits, largest):
        return
    check(indptr.shape[0] > batch, f"illegal memory access: {batch} requests, indptr {indptr.shape[0]}")
    for index, (start, stop) in enumerate(offsets(indptr[: batch + 1])):
        each = -(-(stop - start) // splits)
        for split in range(splits):
            own = slice(min(start + split * each, stop), min(start + (split + 1) * each, stop))
            slots = _slots(indices, own.start, own.stop, k)
            if not slots.numel():
                logits[split, index], largest[split, index] = 0.0, _EMPTY
                continue
            seen = torch.ones(1, slots.numel(), dtype=torch.bool)
            out, lse = attend(
                q[index : index + 1], k[slots], v[slots], seen, scale=known.scale, cap=known.cap
            )
            logits[split, index], largest[split, index] = out[0].float(), (lse[0] * _LOG2E).float()


def _phase_1(
    known: _Constants, splits: int, logits: Tensor, largest: Tensor, indptr: Tensor, out: Tensor
) -> None:
    """Merges as many splits as a request has keys, at most all; 0 / 0 for a request without."""
    batch = logits.shape[1]
    check(out.shape[0] >= batch, f"illegal memory access: {batch} requests in out {list(out.shape)}")
    check(indptr.shape[0] > batch, f"illegal memory access: {batch} requests, indptr {indptr.shape[0]}")
    wrong = out.dtype != known.written or out.shape[1:] != (known.heads, known.v_dim)
    if wrong or not _indices_fit(indptr) or not _fits(known, splits, batch, logits, largest):
        out.fill_(math.nan)
        return
    for index, (start, stop) in enumerate(offsets(indptr[: batch + 1])):
        active = min(stop - start, splits)
        weights = torch.softmax(largest[:active, index].double() / _LOG2E, dim=0)
        found = (weights[:, :, None] * logits[:active, index].double()).sum(0)
        out[index] = found.to(out.dtype) if active else math.nan


# --- extend ------------------------------------------------------------------------------------------------


def get_extend_attention_kernel(
    shape: AttentionShape, mfma_variant: tuple[Any, Any], q_shape: Any, k_shape: Any, v_shape: Any,
    k_cache_shape: Any, v_cache_shape: Any, o_shape: Any, input_dtype: torch.dtype = torch.float16,
    output_dtype: torch.dtype = torch.float32, size_dtype: torch.dtype = torch.int32,
    is_causal: bool = False, logit_cap: float = 0.0, layer_scaling: float | None = None, num_waves: int = 4,
    use_custom_mask: bool = False,
) -> tuple[Kernel, dict[Any, Any], list[str]]:  # fmt: skip
    """(kernel, its symbols' values, its dynamic symbols). First axes of the shapes are dynamic; tiles are 64
    rows for `max_seq_len` up to 128, else 128."""
    assert not (is_causal and use_custom_mask), "Cannot have both causal and custom mask at the same time"
    if not all(isinstance(m, MMAType) for m in mfma_variant):
        raise EmulationError("never compiled", asked=mfma_variant, allowed="two of MMAType")
    known = _constants(shape, input_dtype, output_dtype, layer_scaling, logit_cap, _EXTEND)
    if shape.block_size is None and shape.max_seq_len is None:
        raise TypeError("'<=' not supported between instances of 'NoneType' and 'int'")
    tile = shape.block_size or (64 if int(shape.max_seq_len or 0) <= 128 else 128)

    def run(tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
        _extend(known, tile, is_causal, use_custom_mask, tensors, int(numbers[0]))

    values = {"H": known.heads, "H_KV": known.kv_heads, "D_KV": known.v_dim, "D_Q": known.dim}
    dynamic = ["N_Q", "N_KV", "S", *(["MASK_LEN"] if use_custom_mask else [])]
    name = "extend_attention_custom_mask" if use_custom_mask else "extend_attention"
    tensors = 11 if use_custom_mask else 9
    return Kernel(name, tensors, 1, tuple(values), tuple(dynamic), run), values, dynamic


def _extend(
    known: _Constants, tile: int, causal: bool, masked: bool, tensors: Sequence[Tensor], longest: int
) -> None:
    """The prefix comes from the cache (`kv_*` describe it alone), this step's tokens from k and v."""
    q, k, v, k_cache, v_cache, cu_q, indptr, indices = tensors[:8]
    out = tensors[-1]
    typed = _check_heads(known, q, k, v) and _check_heads(known, q, k_cache, v_cache)
    check(
        out.shape == (q.shape[0], known.heads, known.v_dim), f"illegal memory access: out {list(out.shape)}"
    )
    if not typed or not _indices_fit(cu_q, indptr, indices) or out.dtype != known.written:
        out.fill_(math.nan)
        return
    launched = -(-longest // tile) * tile
    spans = zip(offsets(cu_q), offsets(indptr), strict=True)
    for index, ((start, stop), (first, last)) in enumerate(spans):
        slots, rows = _slots(indices, first, last, k_cache), stop - start
        keys = torch.cat([k_cache[slots], k[start:stop]])
        values = torch.cat([v_cache[slots], v[start:stop]])
        seen = band(rows, keys.shape[0], -1, 0 if causal else -1)
        if masked:
            seen = _custom(tensors[8], int(tensors[9][index]), rows, keys.shape[0])
        live = slice(start, min(stop, start + launched))
        found, _ = attend(q[live], keys, values, seen[: live.stop - start], scale=known.scale, cap=known.cap)
        out[live] = found.to(out.dtype)


def _custom(mask: Tensor, start: int, rows: int, keys: int) -> Tensor:
    """One request's part of a flat int8 mask, rows of prefix and new tokens."""
    check(mask.dtype == torch.int8, "illegal memory access: masks are read as int8")
    check(start + rows * keys <= mask.shape[0], "illegal memory access: the mask ends before")
    return mask[start : start + rows * keys].reshape(rows, keys).bool()
