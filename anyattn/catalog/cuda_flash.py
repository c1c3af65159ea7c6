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
from anyattn.core.capabilities import (
    CapabilityRow,
    Feature,
    HeadDims,
    ModelKind,
    PageSizes,
    Phase,
    Proof,
    Provider,
)

__all__ = ["FA3_DENSE_ROWS", "FA3_MLA_ROWS", "FA4_DENSE_ROWS", "FA4_MLA_ROWS"]

_SGLANG = (
    Provider("sglang-kernel", ">=0.4", ("sgl_kernel",)),
    Provider("sgl-kernel", ">=0.3.21", ("sgl_kernel",)),
)
_VLLM = Provider("vllm", ">=0.33", ("vllm",))
_TOKENSPEED = Provider("tokenspeed-fa3", ">=3.0.0.post20260810", ("flash_attn_interface",))

_PLAIN = (Feature.WINDOW, Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY)
_ENCODER = (Feature.BIDIRECTIONAL, Feature.ENCODER_ONLY, Feature.CROSS)


def _phases(*dtypes: str, graph: int, masks: bool = False, **fields: Any) -> tuple[CapabilityRow, ...]:
    """All phases. Lengths stay on the device, but an extend's longest query is an argument.

    `masks`: rows of explicit masks, too, without windows: their rule is by position, which a table of the
    keys that a query sees can't say (see `backends.cuda.flash_tree`). For verification they come first, so
    that a model without windows can verify trees unasked.
    """

    def rows(lengths: int, *phases: Phase, **more: Any) -> tuple[CapabilityRow, ...]:
        given = {**fields, **more, "host_lengths": lengths, "graph": graph}
        return per_dtype(*dtypes, phases=phases, **given)

    plain = (*rows(1, PREFILL), *rows(0, DECODE, VERIFY, DRAFT))
    if not masks:
        return plain
    unmasked = (Feature.WINDOW, Feature.ENCODER_ONLY, Feature.CROSS)
    features = tuple(f for f in fields["features"] if f not in unmasked)
    masked = {
        "features": (*features, Feature.EXPLICIT_MASK, Feature.TREE_VERIFY),
        "determinism": 1,
        "method": f"{fields['method']}, trees by cascade",
    }
    slow = {"degraded": "masked extends list every key of every query: tokens x context entries a step"}
    return (
        *rows(0, VERIFY, **masked),
        *plain,
        *rows(1, PREFILL, **masked, **(slow if "degraded" not in fields else {})),
        *rows(0, DECODE, DRAFT, **masked),
    )


def _fa3(*dtypes: str, masks: bool = True, **fields: Any) -> tuple[CapabilityRow, ...]:
    """FA3 reads any page. A fixed longest query makes it capturable (vendor-apis §4.3).

    `num_splits=1` makes it batch-invariant (sglang-facts §5.12) where no window is: with one, a kernel is
    chosen by the batch's longest row, and tables begin at a page that depends on how a prompt was cut.
    """
    common = fields | {"graph": 2, "pages": ANY_PAGE, "form": block_table()}
    plain = {**common, "features": tuple(f for f in fields["features"] if f is not Feature.WINDOW)}
    rows = _phases(*dtypes, masks=masks, determinism=1, **common)
    return (*rows, *_phases(*dtypes, determinism=2, **plain))


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
        "bfloat16",  # fp8 calls give bf16: an fp16 model would lose three bits
        fp8=(E4M3,),
        same=False,
        architectures=arch.SM90,
        providers=(*_SGLANG, _VLLM),
        runtime=">=12.3",
        head_dims=HeadDims(minimum=16, maximum=256, multiple=16),
        features=(*_PLAIN, Feature.LOGIT_CAP, Feature.KV_SCALES),
        method="paged varlen, fp8 Q and KV",
        source="sglang-facts §3.1 (no e5m2), §5.2 (Q is cast, D up to 256), FlashAttention-3's own check "
        "(D in steps of 16 bytes); sinks with fp8: no fact",
    ),
    *_fa3(
        *HALVES,
        architectures=arch.SM90,
        providers=(_TOKENSPEED,),
        proof=Proof.HARDWARE,
        runtime=">=12.3",
        head_dims=HeadDims(pairs=square(64, 128, 192, 256)),
        features=(*_PLAIN, *_ENCODER, Feature.SINKS),
        method="paged varlen",
        source="vendor-apis §4.1: cap, D 96 and unequal sizes are compiled out",
    ),
    *_fa3(
        "bfloat16",  # fp8 calls give bf16: an fp16 model would lose three bits
        fp8=(E4M3,),
        same=False,
        architectures=arch.SM90,
        providers=(_TOKENSPEED,),
        proof=Proof.HARDWARE,
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


def _fa3_mla(*shapes: tuple[int, int], **fields: Any) -> tuple[CapabilityRow, ...]:
    """Latents of the model's dtype: `qv` takes no fp8."""
    return _phases(
        *HALVES,
        graph=2,
        determinism=2,
        pages=ANY_PAGE,
        form=block_table(),
        kinds=(ModelKind.MLA,),
        architectures=arch.SM90,
        runtime=">=12.3",
        head_dims=HeadDims(pairs=shapes),
        layouts=("NHD", "HND"),
        features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
        **fields,
    )


FA3_MLA_ROWS = (
    *_fa3_mla(
        LATENT,
        MATERIALISED,
        providers=_SGLANG,
        method="absorbed MLA through qv, materialised prefill",
        source="sglang-facts §5.2 (rope part as Q and K, latent as qv and V), vendor-apis §4.2; none for "
        "tokenspeed-fa3 (unequal sizes compiled out)",
    ),
    *_fa3_mla(
        LATENT,
        providers=(_VLLM,),
        method="absorbed MLA through qv, materialised prefill",
        source="vendor-apis §4.3 (q_v); no fact for (192, 128)",
    ),
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
        masks=ModelKind.MLA not in fields.get("kinds", ()),
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
        head_dims=HeadDims(minimum=32, maximum=256, multiple=32),
        pages=ANY_PAGE,
        form=block_table(),
        features=(*_PLAIN, *_ENCODER, Feature.LOGIT_CAP, Feature.SINKS),
        degraded="no split-KV on SM90: small batches leave most SMs idle",
        method="paged varlen",
        proof=Proof.HARDWARE,
        source="vendor-apis §3; flash_attn/cute/interface.py of 4.0.0b36. On an H200 D 8 on small pages is "
        "refused inside the call (irregular head dim), and D 80 with a mask gave wrong numbers. What "
        "ran there was flash-attn-4's, not tokenspeed-fa4's",
    ),
)

FA4_MLA_ROWS = _fa4(
    kinds=(ModelKind.MLA,),
    architectures=arch.SM100_103_110,
    head_dims=HeadDims(pairs=(LATENT, MATERIALISED)),
    pages=ANY_PAGE,
    form=block_table(),
    layouts=("NHD", "HND"),
    features=(Feature.LSE, Feature.CUSTOM_SCALE, Feature.RAGGED_VERIFY),
    method="absorbed MLA through qv, materialised prefill",
    source="vendor-apis §3; interface.py of 4.0.0b36: (192, 128), and qv without window or cap, on SM100, "
    "SM103, SM110",
)
