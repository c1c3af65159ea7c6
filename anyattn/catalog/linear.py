"""Records of recurrent layers: `gdn`, `kda`, `lightning`, `mamba2`, `short_conv`.

They keep one state a request instead of keys and values, so `pages` is 1, `form` is the request's state
slot and `kv_dtypes` are those of the state. `head_dims` are (key size, value size) of a head; for Mamba2
(state size, head size), for short convolutions the channels.
"""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import DECODE, FLASHINFER_07, HALVES, PREFILL, TRITON, VERIFY, square
from anyattn.core.capabilities import (
    BackendRecord,
    CapabilityRow,
    FormSpec,
    HeadDims,
    ModelKind,
    PageSizes,
    Phase,
    Provider,
)

__all__ = ["RECORDS"]

_FLA = (Provider("fla-core", ">=0.6", ("fla",)),)
_STATE: dict[str, Any] = {
    "kinds": (ModelKind.LINEAR,),
    "dtypes": HALVES,
    "pages": PageSizes((1,)),
    "form": FormSpec("request_table", kernel_page=1),
}
# FLA runs wherever Triton does and lists no chips; CUDA's are the ones that Triton was compiled for.
_FLA_CHIPS: dict[str, Any] = {"architectures": arch.CUDA, "providers": _FLA, "requires": (TRITON,)}
_UP_TO_256 = HeadDims(minimum=16, maximum=256, multiple=16, equal=False)


def _fla(
    phases: tuple[Phase, ...], state: tuple[str, ...], method: str, source: str, *, chunked: bool
) -> CapabilityRow:
    """A chunk form (prefill; reads offsets on the host) or a recurrent one."""
    return CapabilityRow(
        phases=phases,
        kv_dtypes=state,
        head_dims=_UP_TO_256,
        host_lengths=2 if chunked else 0,
        graph=0 if chunked else 1,
        method=method,
        source=source,
        **_FLA_CHIPS,
        **_STATE,
    )


_GDN_ROWS = (
    _fla(
        (PREFILL,),
        ("float32", "bfloat16"),
        "chunk_gated_delta_rule",
        "vendor-apis §12: float32 state advised; K limit of KDA assumed",
        chunked=True,
    ),
    _fla(
        (DECODE,),
        ("float32", "bfloat16"),
        "fused_recurrent_gated_delta_rule",
        "vendor-apis §12: states are copied in and out, the public call has no pool",
        chunked=False,
    ),
    CapabilityRow(
        phases=(DECODE, VERIFY),
        architectures=arch.SM100_103,
        providers=(FLASHINFER_07,),
        runtime=">=12.8",
        head_dims=HeadDims(pairs=square(128)),
        kv_dtypes=("bfloat16",),
        host_lengths=0,
        graph=1,
        method="FlashInfer GDN decode on a state pool",
        source="vendor-apis §2.11; sglang-facts §8: bf16 state on SM100; other chips: no fact",
        **_STATE,
    ),
)

_KDA_ROWS = (
    _fla((PREFILL,), ("float32",), "chunk_kda", "vendor-apis §12: K up to 256, float32 state", chunked=True),
    _fla((DECODE,), ("float32",), "fused_recurrent_kda", "vendor-apis §12", chunked=False),
)

_LIGHTNING_ROWS = (
    _fla((PREFILL,), ("float32",), "chunk_lightning_attn", "vendor-apis §12", chunked=True),
    _fla((DECODE,), ("float32",), "fused_recurrent_lightning_attn", "vendor-apis §12", chunked=False),
)

_MAMBA = (Provider("mamba-ssm", ">=2.3", ("mamba_ssm",)),)
_MAMBA2_ROWS = (
    CapabilityRow(
        phases=(PREFILL,),
        architectures=arch.CUDA,
        providers=_MAMBA,
        requires=(TRITON,),
        head_dims=_UP_TO_256,
        kv_dtypes=("float32", "bfloat16"),
        host_lengths=2,
        method="mamba_chunk_scan_combined",
        source="vendor-apis §13; chips and sizes aren't listed by the library",
        **_STATE,
    ),
    CapabilityRow(
        phases=(DECODE,),
        architectures=arch.CUDA,
        providers=(*_MAMBA, FLASHINFER_07),
        requires=(TRITON,),
        head_dims=_UP_TO_256,
        kv_dtypes=("float32", "bfloat16"),
        host_lengths=0,
        graph=1,
        method="selective_state_update on a state pool",
        source="vendor-apis §13, §2.11: (D, z, dt_bias) in both, another order in vLLM's fork",
        **_STATE,
    ),
)

_SHORT_CONV_ROWS = (
    CapabilityRow(
        phases=(PREFILL, DECODE),
        architectures=arch.CUDA,
        providers=(Provider("causal-conv1d", ">=1.7", ("causal_conv1d",)),),
        head_dims=HeadDims(maximum=65536, multiple=8),
        kv_dtypes=HALVES,
        host_lengths=1,
        graph=0,
        method="causal_conv1d",
        source="vendor-apis §1.6 (source distribution only); chips, widths and alignment: no fact",
        **_STATE,
    ),
)

RECORDS = (
    BackendRecord(name="gdn", summary="Gated DeltaNet layers (FLA, FlashInfer)", rows=_GDN_ROWS),
    BackendRecord(name="kda", summary="Kimi delta attention layers (FLA)", rows=_KDA_ROWS),
    BackendRecord(name="lightning", summary="Lightning attention layers (FLA)", rows=_LIGHTNING_ROWS),
    BackendRecord(name="mamba2", summary="Mamba2 layers (mamba-ssm, FlashInfer)", rows=_MAMBA2_ROWS),
    BackendRecord(name="short_conv", summary="short causal convolutions with a state", rows=_SHORT_CONV_ROWS),
)
