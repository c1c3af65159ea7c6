"""Shared by FlashInfer's stand-ins: the emulated chip, argument checks, caches, masks, results.

Read in flashinfer-python 0.7.2.post1 (`flashinfer/utils.py`, `data/csrc`, `data/include`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from anyattn.testing.emulators import softmax
from anyattn.testing.emulators.modules import current_host

__all__ = [
    "FP8",
    "LOG2E",
    "as_dtype",
    "check_aligned",
    "check_layout",
    "check_like",
    "chip",
    "contiguous_view",
    "finish_lse",
    "host_copy",
    "host_reads",
    "kv_lengths",
    "page_rows",
    "put",
    "scalar",
    "to_device",
    "token_major",
    "unpack_cache",
    "use_workspace",
]

LOG2E = 1.4426950408889634
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

host_reads: list[tuple[str, torch.Tensor]] = []
"""What `plan` copied to the host, by argument name: free for host tensors, a synchronisation for a
device's. Emptied when stand-ins are made; on the CPU a test tells the two apart by their storage."""


def chip() -> int:
    """Compute capability of the emulated chip: 90 for `cuda:sm90`."""
    host = current_host() or "cuda:sm90"
    return int(host.partition("sm")[2])


def host_copy(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The library's `.to("cpu")`, noted in `host_reads`."""
    host_reads.append((name, tensor))
    return tensor.to("cpu", copy=True)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The library's `.to(self.device)` of a host array: a copy, of what the array gives for that device."""
    moved = tensor.to(device, non_blocking=True)
    return moved.clone() if moved is tensor else moved


def as_dtype(value: torch.dtype | str) -> torch.dtype:
    """A dtype, or torch's name of one. Raises `TypeError` for anything else."""
    if isinstance(value, str):
        found: torch.dtype = getattr(torch, value)
        return found
    if isinstance(value, torch.dtype):
        return value
    raise TypeError(f"dtype must be a string or torch.dtype, got {type(value)}")


def check_layout(kv_layout: str) -> None:
    """Raises `KeyError` as the library does."""
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}")


def check_like(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> None:
    """Raises `ValueError` as the library's check of shape and dtype does."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"Invalid shape of {name}: expected {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {x.dtype}")


def check_aligned(name: str, x: torch.Tensor) -> None:
    """Kernels load 16 bytes at a time: rows must begin there, or the device faults.

    Raises:
        RuntimeError: a pointer or stride that isn't a multiple of 16 bytes, or a strided last axis.
    """
    if not x.numel():
        return
    inner = x.stride(-1) == 1 or x.shape[-1] == 1
    rows = [s * x.element_size() for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    if not inner or x.data_ptr() % 16 or any(step % 16 for step in rows):
        raise RuntimeError(f"CUDA error: misaligned address ({name}, strides {x.stride()}, {x.dtype})")


def unpack_cache(
    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as they were given, from a pair or one 5-D tensor. Raises `KeyError`, `ValueError`."""
    if isinstance(cache, tuple):
        k, v = cache
    elif torch.is_tensor(cache):
        if cache.ndim != 5:
            raise ValueError(f"expected a 5-D paged_kv_cache, got {cache.ndim}-D")
        k, v = cache.unbind(dim=1)
    else:
        raise KeyError(f"Unrecognized paged_kv_cache type {type(cache)}, expect a tensor or a tuple")
    for x in (k, v):
        if x.ndim != 4:
            raise ValueError(f"paged cache must be 4-D ({kv_layout}), got {x.ndim}-D")
    return k, v


def token_major(cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    """`[N, P, Hkv, D]` from storage that the caller calls NHD or HND."""
    return cache.transpose(1, 2) if kv_layout == "HND" else cache


def kv_lengths(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """KV tokens of each request (`get_seq_lens`): no page, then what `last_page_len` says."""
    return torch.clamp(indptr[1:] - indptr[:-1] - 1, min=0) * page_size + last_page_len


def page_rows(cache: torch.Tensor, indices: torch.Tensor, span: tuple[int, int], length: int) -> torch.Tensor:
    """Keys 0 .. `length` - 1 `[length, H, D]` of the request whose pages are `indices[span]`."""
    return softmax.gather(cache, indices[span[0] : span[1]], length)


def contiguous_view(x: torch.Tensor) -> torch.Tensor:
    """`x`'s memory as a kernel sees it that knows no strides: from the first element on, without gaps.

    Raises:
        RuntimeError: the memory ends before.
    """
    strides, step = [], 1
    for size in reversed(x.shape):
        strides.append(step)
        step *= size
    return x.as_strided(x.shape, tuple(reversed(strides)))


def put(out: torch.Tensor, value: torch.Tensor, *, strided: bool) -> None:
    """Write a result through `out`'s pointer; `strided`: the kernel takes the strides of tokens and heads."""
    target = out if strided else contiguous_view(out)
    target.copy_(value.to(out.dtype))


def finish_lse(natural: torch.Tensor, base: str, layout: str, lse: torch.Tensor | None) -> torch.Tensor:
    """The LSE in the base and axis order asked for, into `lse` where the caller gave one.

    Raises:
        ValueError: an unknown base or layout.
    """
    if base not in ("log2", "ln"):
        raise ValueError(f"lse_base must be one of ('log2', 'ln'), got {base!r}")
    if layout not in ("NH", "HN"):
        raise ValueError(f"lse_layout must be one of ('NH', 'HN'), got {layout!r}")
    value = natural if base == "ln" else natural * LOG2E
    value = (value.T if layout == "HN" else value).to(torch.float32)
    if lse is None:
        return value.contiguous()
    check_like(lse, value.shape, torch.float32, "lse")
    put(lse, value, strided=False)
    return lse


def scalar(name: str, value: Any) -> float:
    """An argument that the compiled function takes as a double.

    Raises:
        TypeError: a tensor, which the call gate refuses.
    """
    if isinstance(value, torch.Tensor):
        raise TypeError(f"Mismatched type on argument {name}: expected float, got Tensor")
    result = float(value)
    return result if math.isfinite(result) else math.nan


def use_workspace(workspace: torch.Tensor) -> None:
    """Leave marks in scratch memory, so that who needs it zeroed shows that it shares it."""
    flat = workspace.view(-1)[:64]
    flat.copy_(torch.full_like(flat, 7))
