"""dtype names as used in requests, catalogs and decisions, and their torch counterparts."""

from __future__ import annotations

import torch

from anyattn.errors import UnknownNameError

__all__ = ["DTYPES", "dtype_name", "is_fp8", "torch_dtype"]

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def torch_dtype(name: str) -> torch.dtype:
    """`"bfloat16"` -> `torch.bfloat16`. Raises `UnknownNameError`."""
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return DTYPES[name]


def dtype_name(dtype: torch.dtype | str) -> str:
    """`torch.bfloat16` -> `"bfloat16"`; names pass through. Raises `UnknownNameError`."""
    name = dtype if isinstance(dtype, str) else _NAMES.get(dtype, str(dtype).removeprefix("torch."))
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, DTYPES)
    return name


def is_fp8(dtype: torch.dtype) -> bool:
    """True for the 8-bit floats that KV may be stored in."""
    return dtype.is_floating_point and dtype.itemsize == 1
