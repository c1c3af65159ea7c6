"""Matrix products of a decoder at small row counts, where the plain call is far from the memory bandwidth.

Measured for SmolLM2-135M's shapes in float32 on 2 cores of an AMD EPYC with torch 2.13 (all products of
one step, ms): `F.linear` 45 / 76 / 57 / 65 / 140 at 1 / 2 / 8 / 16 / 64 rows, oneDNN's inner product on a
weight that was reordered once 24 / 24 / 25 / 31 / 97. (`mm` with a transposed weight: 30 at 1 row, 68 at 8.)
`torch.compile` calls the same operators when it freezes a model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

__all__ = ["Linear", "make_linear"]

Linear = Callable[[torch.Tensor], torch.Tensor]
"""`x [T, in] -> [T, out]`."""


def make_linear(weight: torch.Tensor) -> Linear:
    """`x @ weight.T` for a fixed `weight [out, in]`, by the fastest way that this machine has.

    The packed form is used only after it reproduced `F.linear`; otherwise the weight is kept as it is, as it
    is inside `torch.backends.mkldnn.flags(enabled=False)` (the CPU recorder can't hold packed weights).
    """
    packed = _packed(weight) if _packable(weight) else None
    if packed is not None:
        return packed
    weight = weight.contiguous()
    return lambda x: F.linear(x, weight)


def _packable(weight: torch.Tensor) -> bool:
    onednn = torch.backends.mkldnn
    if weight.device.type != "cpu" or not onednn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not getattr(onednn, "enabled", True):  # `torch.backends.mkldnn.flags(enabled=False)`
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _packed(weight: torch.Tensor) -> Linear | None:
    """The product through oneDNN's packed weight, or None where that is missing or disagrees."""
    try:
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        product = torch.ops.mkldnn._linear_pointwise.default
    except (AttributeError, RuntimeError):
        return None
    out_features = weight.shape[0]

    def linear(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:  # oneDNN refuses empty products
            return x.new_empty(0, out_features)
        result: torch.Tensor = product(x, reordered, None, "none", [], "")
        return result

    return linear if _agrees(linear, weight) else None


def _agrees(linear: Linear, weight: torch.Tensor) -> bool:
    """One product of a fixed row, compared with `F.linear` to rounding."""
    row = torch.linspace(-1.0, 1.0, weight.shape[1], dtype=torch.float32).to(weight.dtype).unsqueeze(0)
    try:
        got, expected = linear(row).float(), F.linear(row, weight).float()
    except RuntimeError:
        return False
    bound = 1e-5 if weight.dtype is torch.float32 else 2e-2
    return bool((got - expected).abs().max() <= bound * expected.abs().max())
