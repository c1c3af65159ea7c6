"""Faults in the calls of `aiter`; shown by the stand-in of its library."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_KERNELS = "anyattn.backends.rocm.aiter_kernels"
_LAYERS = "anyattn.backends.rocm.aiter_layers"
_BACKEND = "anyattn.backends.rocm.aiter:AiterAttention"
_DECODE = f"{_KERNELS}:PagedDecode.run"
_UNIFIED = f"{_KERNELS}:Unified.run"
_PREFILL = f"{_KERNELS}:BatchPrefill.run"

MUTANTS = (
    Mutant(
        name="aiter: the HIP kernel's window without the query's own key",
        where=_DECODE,
        old="sliding_window=layer.window or 0",
        new="sliding_window=max(layer.window - 1, 1) if layer.window else 0",
        names=("window",),
    ),
    Mutant(
        name="aiter: CK's window as the count of its keys",
        where=_PREFILL,
        old="window_size=layer.sides",
        new="window_size=(layer.window or -1, 0)",
        names=("window",),
    ),
    Mutant(
        name="aiter: the Triton kernel's window as the count of its keys",
        where=_UNIFIED,
        old="window_size=layer.sides",
        new="window_size=(layer.window or -1, 0)",
        names=("window",),
    ),
    Mutant(
        name="aiter: lengths before this step's token",
        where=_DECODE,
        old="context_lens=table.kv_lens",
        new="context_lens=table.kv_lens - 1",
        names=("decode",),
    ),
    Mutant(
        name="aiter: cache read as HND",
        where=_DECODE,
        old='kv_cache_layout="NHD"',
        new='kv_cache_layout="HND"',
        names=("decode",),
    ),
    Mutant(
        name="aiter: CK's cap left out",
        where=_PREFILL,
        old="logits_soft_cap=layer.cap",
        new="logits_soft_cap=0.0",
        names=("cap",),
    ),
    Mutant(
        name="aiter: softmax scale of the head size",
        where=_DECODE,
        old="scale=layer.scale",
        new="scale=call.q.shape[2] ** -0.5",
        names=("scale",),
    ),
    Mutant(
        name="aiter: sinks left out",
        where=_UNIFIED,
        old="sinks=layer.layer.sinks",
        new="sinks=None",
        names=("sink",),
    ),
    Mutant(
        name="aiter: K's scale left out",
        where=_DECODE,
        old="k_scale=layer.k_scale",
        new="k_scale=torch.ones_like(layer.k_scale)",
        names=("K scale",),
    ),
    Mutant(
        name="aiter: outputs with gaps handed over",
        where=f"{_LAYERS}:dense_rows",
        old="return out if out.is_contiguous() else",
        new="return out if out.is_floating_point() else",
        names=("strided", "out"),
    ),
    Mutant(
        name="aiter: declares that tables are read while planning",
        where=f"{_BACKEND}.traits",
        old="SharedReadEnds.IN_REPLAY",
        new="SharedReadEnds.PRE_REPLAY",
        names=("shared-reads",),
    ),
)
