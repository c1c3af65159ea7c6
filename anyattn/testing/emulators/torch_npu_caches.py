"""Keys and values where torch-npu's operators find them: caches plain (ND) and fractal (NZ), their writers.

NZ puts 16 numbers of a head side by side: `[N, Hkv * D / 16, P, 16]` for ATB's operators on 310P and for
`PA_NZ` writes, `[N, Hkv, D / 16, P, 16]` for fused infer attention. Whether a tensor's format label says so
(`npu_format_cast`) isn't checked: it lives outside of the shape.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from anyattn.testing.emulators.modules import EmulationError, current_host
from anyattn.testing.emulators.softmax import check, gather

__all__ = [
    "chip",
    "format_cast",
    "format_of",
    "nz_mask",
    "pages",
    "plain_cache",
    "reshape_and_cache",
    "rows_of",
    "scatter_pa_kv_cache",
]

Tensor = torch.Tensor
_NZ = 29
_CHUNK = 16


def chip() -> str:
    """The emulated chip: `910b`, `910c` or `310p`."""
    return (current_host() or "ascend:910b").partition(":")[2][:4]


def plain_cache(cache: Tensor, heads: int) -> Tensor:
    """ATB's cache as `[N, P, Hkv, D]`.

    Raises:
        RuntimeError: another layout than the chip's.
    """
    if chip() != "310p":
        check(cache.dim() == 4 and cache.shape[2] == heads, f"cache {list(cache.shape)} isn't [N, P, Hkv, D]")
        return cache
    check(cache.dim() == 4 and cache.shape[3] == _CHUNK, f"on 310P a cache is NZ, not {list(cache.shape)}")
    check(cache.shape[1] % heads == 0, f"{cache.shape[1]} chunks aren't those of {heads} heads")
    return _unchunked(cache.reshape(cache.shape[0], heads, -1, cache.shape[2], _CHUNK))


def pages(cache: Tensor, heads: int, layout: str, dim: int) -> Tensor:
    """Fused infer attention's cache as `[N, P, Hkv, D]`: told apart by rank, as the library does.

    Three axes `[N, P, Hkv * D]`, four `[N, Hkv, P, D]` (queries as BNSD or TND), five NZ.

    Raises:
        RuntimeError: rank, heads or head size don't fit.
    """
    check(cache.is_contiguous(), "key and value must be contiguous")
    if cache.dim() == 3:
        check(cache.shape[2] == heads * dim, f"a cache of H {cache.shape[2]} has no {heads} heads of {dim}")
        check(cache.shape[2] <= 65535, "H of a cache [blocknum, blocksize, H] is above 65535")
        return cache.reshape(cache.shape[0], cache.shape[1], heads, dim)
    if cache.dim() == 4:
        check(
            layout in ("BNSD", "BNSD_BSND", "TND"),
            f"with {layout} a cache is [blocknum, blocksize, H], not {list(cache.shape)}",
        )
        fits = cache.shape[1] == heads and cache.shape[3] == dim
        check(fits, f"cache {list(cache.shape)} isn't [blocknum, {heads}, blocksize, {dim}]")
        return cache.transpose(1, 2)
    fits = cache.dim() == 5 and cache.shape[1:3] == (heads, dim // _CHUNK) and cache.shape[4] == _CHUNK
    check(fits, f"cache {list(cache.shape)} isn't NZ [blocknum, {heads}, {dim // _CHUNK}, blocksize, 16]")
    return _unchunked(cache)


def _unchunked(cache: Tensor) -> Tensor:
    """`[N, P, Hkv, D]` of `[N, Hkv, D / 16, P, 16]`."""
    pages, heads, chunks, page, chunk = cache.shape
    return cache.permute(0, 3, 1, 2, 4).reshape(pages, page, heads, chunks * chunk)


def rows_of(cache: Tensor, table: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Each request's keys `[n, Hkv, D]` out of pages.

    Raises:
        RuntimeError: a table of another dtype, or too small.
    """
    check(table.dtype == torch.int32 and table.dim() == 2, "block_table must be int32 with two axes")
    check(
        table.shape[0] == len(lengths), f"block_table has {table.shape[0]} rows for {len(lengths)} requests"
    )
    page = cache.shape[1]
    needed = max((-(-n // page) for n in lengths), default=0)
    check(table.shape[1] >= needed, f"block_table is {table.shape[1]} wide, {needed} blocks are needed")
    return [gather(cache, row, n) for row, n in zip(table, lengths, strict=True)]


def nz_mask(mask: Tensor, columns: int) -> Tensor:
    """ATB's mask as `[rows, columns]`: what is given (ND), or NZ `[1, columns / 16, rows, 16]` on 310P.

    Raises:
        RuntimeError: the chip's other format, or too few columns.
    """
    if chip() == "310p":
        fits = mask.dim() == 4 and mask.shape[0] == 1 and mask.shape[3] == _CHUNK
        check(fits, f"on 310P a mask is NZ [1, S / 16, rows, 16], not {list(mask.shape)}")
        mask = mask[0].permute(1, 0, 2).reshape(mask.shape[2], -1)
    check(mask.dim() == 2, f"a mask {list(mask.shape)} has more axes than rows and keys")
    check(mask.shape[1] >= columns, f"a mask of {mask.shape[1]} keys for {columns}")
    return mask


# --- writers -----------------------------------------------------------------------------------------------


def _write(cache: Tensor, values: Tensor, slots: Tensor, *, fractal: bool) -> None:
    heads, dim = values.shape[1:]
    if fractal:
        fits = cache.dim() == 4 and cache.shape[3] == _CHUNK and cache.shape[1] * _CHUNK == heads * dim
        check(fits, f"cache {list(cache.shape)} isn't NZ [N, {heads * dim // _CHUNK}, P, 16]")
        page = cache.shape[2]
    else:
        check(cache.dim() == 4 and cache.shape[2:] == (heads, dim), f"cache {list(cache.shape)} isn't ND")
        page = cache.shape[1]
    index = slots.long()
    inside = not index.numel() or (int(index.min()) >= 0 and int(index.max()) < cache.shape[0] * page)
    check(inside, f"slots outside of [0, {cache.shape[0] * page})")
    if fractal:
        cache[index // page, :, index % page] = values.reshape(values.shape[0], -1, _CHUNK)
    else:
        cache[index // page, index % page] = values


def _check_written(call: Mapping[str, Any], slots: Tensor) -> None:
    key, value = call["key"], call["value"]
    check(key.dim() == 3 == value.dim(), "key and value have three axes")
    check(key.shape[:2] == value.shape[:2], "key and value differ in tokens or heads")
    check(slots.dim() == 1 and slots.shape[0] == key.shape[0], "one slot a token")
    dtypes = {call[n].dtype for n in ("key", "value", "key_cache", "value_cache")}
    check(len(dtypes) == 1, f"key, value and caches differ in dtype: {sorted(map(str, dtypes))}")


def reshape_and_cache(call: Mapping[str, Any]) -> Sequence[Tensor]:
    """`_npu_reshape_and_cache`: int32 slots; NZ caches on 310P, ND elsewhere."""
    slots = call["slot_indices"]
    check(slots.dtype == torch.int32, f"slot_indices must be int32, not {slots.dtype}")
    _check_written(call, slots)
    for cache, values in (("key_cache", "key"), ("value_cache", "value")):
        _write(call[cache], call[values], slots, fractal=chip() == "310p")
    return ()


def scatter_pa_kv_cache(call: Mapping[str, Any]) -> Sequence[Tensor]:
    """`npu_scatter_pa_kv_cache`: 910B and 910C alone; `cache_mode` is NZ unless the caller says "Norm"."""
    check(chip() != "310p", "npu_scatter_pa_kv_cache isn't supported on Ascend310P")
    if any(call[n] is not None for n in ("compress_lens", "compress_seq_offsets", "seq_lens")):
        raise EmulationError("compressed writes aren't emulated", asked="compress_lens", allowed="None")
    slots, mode = call["slot_mapping"], call["cache_mode"]
    check(
        slots.dtype in (torch.int32, torch.int64), f"slot_mapping must be int32 or int64, not {slots.dtype}"
    )
    check(mode in (None, "Norm", "PA_NZ"), f"cache_mode {mode!r} isn't 'Norm' or 'PA_NZ'")
    _check_written(call, slots)
    for name in ("key", "value", "key_cache", "value_cache"):
        check(call[name].is_contiguous(), f"{name} must be contiguous")
    for cache, values in (("key_cache", "key"), ("value_cache", "value")):
        _write(call[cache], call[values], slots, fractal=mode == "PA_NZ")
    return ()


# --- formats -----------------------------------------------------------------------------------------------

_formats: MutableMapping[Tensor, int] = WeakTensorKeyDictionary()


def format_cast(input: Tensor, acl_format: int, **_: Any) -> Tensor:
    """A tensor of that format: new memory where the format changes (as on a device), else the same tensor."""
    if format_of(input) == acl_format:
        return input
    found = input.clone()
    _formats[found] = acl_format
    return found


def format_of(tensor: Tensor) -> int:
    """`get_npu_format`: 2 is ND, 29 NZ."""
    return _formats.get(tensor, 2)
