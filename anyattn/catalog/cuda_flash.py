"""Rows of `fa3` and `fa4`: FlashAttention-3 by who ships it, FlashAttention-4 by chip."""

from __future__ import annotations

from typing import Any

from anyattn.catalog import architectures as arch
from anyattn.catalog.building import (
    ANY_PAGE,
    DECODE,
    DRAFT,
    E4M3,
    HALVES,
    LATENT,
    MATERIALISED,
    PREFILL,
    VERIFY,
    block_table,
    per_dtype,
    square,
)
from anyattn.core.capabilities import CapabilityRow, Feature, HeadDims, ModelKind, PageSizes, Provider

__all__ = ["FA3_DENSE_ROWS", "FA3_MLA_ROWS", "FA4_DENSE_ROWS", "FA4_MLA_ROWS"]

_SGLANG = (
    Provider("sglang-kernel", ">=0.4", ("sgl_kernel",)),
    Provider("sgl-kernel", ">=0.3.21", ("sgl_kernel",)),
)
_VLLM = Provider("vllm", ">=0.33", ("vllm",))
_TOKENSPEED = Provider("tokenspeed-fa3", ">=3.0.0.post20260810", ("flash_attn_interface",))

_PLAIN = (Feature.WINDOW, Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY)
_ENCODER = (Feature.BIDIRECTIONAL, Feature.ENCODER_ONLY, Feature.CROSS)


def _phases(*dtypes: str, graph: int, **fields: Any) -> tuple[CapabilityRow, ...]:
    """All phases. Lengths stay on the device, but an extend's longest query is an argument."""
    return (
        *per_dtype(*dtypes, phases=(PREFILL,), host_lengths=1, graph=graph, **fields),
        *per_dtype(*dtypes, phases=(DECODE, VERIFY, DRAFT), host_lengths=0, graph=graph, **fields),
    )


def _fa3(*dtypes: str, **fields: Any) -> tuple[CapabilityRow, ...]:
    """FA3 reads any page. `num_splits=1` makes it batch-invariant (sglang-facts §5.12); a fixed longest
    query makes it capturable (vendor-apis §4.3)."""
    return _phases(*dtypes, graph=2, determinism=2, pages=ANY_PAGE, form=block_table(), **fields)


FA3_DENSE_ROWS = (
    *_fa3(
        *HALVES,
        architectures=arch.SM90,
        providers=(*_SGLANG, _VLLM),
        runtime=">=12.3",
        head_dims=HeadDims(minimum=8, maximum=256, multiple=8),
        features=(*_PLAIN, *_ENCODER, Feature.LOGIT_CAP, Feature.SINKS),
        method="paged varlen",
        source="vendor-apis §4.2, §4.3; sglang-facts §3.1, §5.2",
    ),
    *_fa3(
        *HALVES,
        architectures=arch.SM90,
        providers=_SGLANG,
        runtime=">=12.3",
        head_dims=HeadDims(pairs=(MATERIALISED,)),
        features=(*_PLAIN, Feature.LOGIT_CAP),
        method="paged varlen",
        source="vendor-apis §4.2; sglang-facts §5.2",
    ),
    *_fa3(
        *HALVES,
        fp8=(E4M3,),
        same=False,
        architectures=arch.SM90,
        providers=(*_SGLANG, _VLLM),
        runtime=">=12.3",
        head_dims=HeadDims(minimum=8, maximum=256, multiple=8),
        features=(*_PLAIN, Feature.LOGIT_CAP, Feature.KV_SCALES),
        method="paged varlen, fp8 Q and KV",
        source="sglang-facts §3.1 (no e5m2), §5.2 (Q is cast, D up to 256); sinks with fp8: no fact",
    ),
    *_fa3(
        *HALVES,
        architectures=arch.SM90,
        providers=(_TOKENSPEED,),
        runtime=">=12.3",
        head_dims=HeadDims(pairs=square(64, 128, 192, 256)),
        features=(*_PLAIN, *_ENCODER, Feature.SINKS),
        method="paged varlen",
        source="vendor-apis §4.1: cap, D 96 and unequal sizes are compiled out",
    ),
    *_fa3(
        *HALVES,
        fp8=(E4M3,),
        same=False,
        architectures=arch.SM90,
        providers=(_TOKENSPEED,),
        runtime=">=12.3",
        head_dims=HeadDims(pairs=square(64, 128, 192, 256)),
        features=(*_PLAIN, Feature.KV_SCALES),
        method="paged varlen, fp8 Q and KV",
        source="vendor-apis §4.1 (fp8 is in), §4.2",
    ),
    *_fa3(
        *HALVES,
        architectures=arch.SM80_86_89,
        providers=_SGLANG,
        runtime=">=12.3",
        head_dims=HeadDims(pairs=square(64, 128)),
        features=(*_PLAIN, Feature.LOGIT_CAP),
        degraded="its gate admits SM8x, but 0.4.10's wheel lists code for SM90 and SM100 only: run it first",
        method="paged varlen, SM8x",
        source="vendor-apis §4.2 (gate), sglang-facts §3.1; against it hardware-free-checks §5; not MLA",
    ),
)

FA3_MLA_ROWS = _fa3(
    *HALVES,
    kinds=(ModelKind.MLA,),
    architectures=arch.SM90,
    providers=(*_SGLANG, _VLLM),
    runtime=">=12.3",
    head_dims=HeadDims(pairs=(LATENT,)),
    layouts=("NHD", "HND"),
    features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
    method="absorbed MLA through qv",
    source="sglang-facts §5.2 (rope part as Q and K, latent as qv and V); no fact for fp8 latents, none for "
    "tokenspeed-fa3 (unequal sizes compiled out)",
)

_FA4 = (
    Provider("flash-attn-4", ">=4.0.0b18", ("flash_attn.cute",)),
    Provider("tokenspeed-fa4", "", ("flash_attn.cute",)),
)
_DSL = (Provider("nvidia-cutlass-dsl", ">=4.6.2", ("cutlass",)),)


def _fa4(**fields: Any) -> tuple[CapabilityRow, ...]:
    """FA4's TMA paging reads whole pages: NaN in the tail of a last page poisons the result (§3).

    No rows for SM80, SM86, SM89, SM120, SM121: there it has no paged KV. fp8 KV: private interface only.
    """
    features = fields.pop("features")
    return _phases(
        *HALVES,
        graph=1,
        providers=_FA4,
        requires=_DSL,
        features=features,
        determinism=1,
        tolerates_nan_tail=False,
        **fields,
    )


FA4_DENSE_ROWS = (
    *_fa4(
        architectures=arch.SM100_103_110,
        head_dims=HeadDims(pairs=(MATERIALISED,), minimum=8, maximum=128, multiple=8),
        pages=ANY_PAGE,
        form=block_table(),
        features=(*_PLAIN, *_ENCODER, Feature.LOGIT_CAP, Feature.SINKS),
        method="paged varlen, split KV",
        source="vendor-apis §3; not batch-invariant in vLLM",
    ),
    *_fa4(
        architectures=arch.SM100_103_110,
        head_dims=HeadDims(pairs=square(256)),
        pages=PageSizes(multiple_of=128),
        form=block_table(),
        features=_PLAIN,
        method="paged varlen, D 256",
        source="vendor-apis §3: vLLM wants pages of 128 and refuses sinks and cap at D 256",
    ),
    *_fa4(
        architectures=arch.SM90,
        head_dims=HeadDims(minimum=8, maximum=256, multiple=8),
        pages=ANY_PAGE,
        form=block_table(),
        features=(*_PLAIN, *_ENCODER, Feature.LOGIT_CAP, Feature.SINKS),
        degraded="no split-KV on SM90: small batches leave most SMs idle",
        method="paged varlen",
        source="vendor-apis §3; flash_attn/cute/interface.py of 4.0.0b36",
    ),
)

FA4_MLA_ROWS = _fa4(
    kinds=(ModelKind.MLA,),
    architectures=arch.SM100_103_110,
    head_dims=HeadDims(pairs=(LATENT,)),
    pages=ANY_PAGE,
    form=block_table(),
    layouts=("NHD", "HND"),
    features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
    method="absorbed MLA through qv",
    source="vendor-apis §3; interface.py of 4.0.0b36: qv on SM100, SM103, SM110, without window or cap",
)
