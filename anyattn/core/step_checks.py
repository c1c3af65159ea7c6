"""Can a backend run this batch: its need of host lengths, mixed steps, masks and drafts."""

from __future__ import annotations

from collections.abc import Iterator

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.capabilities import CapabilityRow, Feature
from anyattn.core.masks import VerifyMask
from anyattn.core.metadata.drafts import check_drafts, is_ragged
from anyattn.core.spec import Limits
from anyattn.core.traits import Determinism, GraphSupport, HostLengthNeed, MixedSupport, Traits
from anyattn.errors import FeatureError, HostLengthError

__all__ = ["asks_nothing", "check_served", "declared_traits"]


def declared_traits(row: CapabilityRow) -> Traits:
    """What a capability row says of a mode."""
    return Traits(
        host_lengths=HostLengthNeed(row.host_lengths),
        graph=GraphSupport(row.graph),
        determinism=Determinism(row.determinism),
        ragged_verify=Feature.RAGGED_VERIFY in row.features,
        tolerates_nan_tail=row.tolerates_nan_tail,
    )


def asks_nothing(batch: ForwardBatch, traits: Traits) -> bool:
    """`check_served` would find nothing to ask of the backend: decode without a mask, any lengths."""
    return (
        batch.forward_mode is ForwardMode.DECODE
        and batch.mask is None
        and traits.host_lengths is HostLengthNeed.NONE
    )


def check_served(
    batch: ForwardBatch, traits: Traits, name: str, limits: Limits
) -> Iterator[tuple[Feature, str]]:
    """Features that the batch asks of backend `name`, each with who asks.

    Raises:
        HostLengthError: lengths that the host doesn't know. FeatureError: a mixed batch on a backend without.
        BatchError: more draft tokens than `limits`.
    """
    need = traits.host_lengths
    if need is HostLengthNeed.EXACT and batch.exact is None:
        raise HostLengthError(
            f"{name} needs exact lengths on the host for {batch.forward_mode.value}",
            asked=type(batch.host_lens).__name__,
            allowed="Exact",
            hint='give lists, host_lens=Exact(…), or accept a device-to-host copy with host_lens="copy"',
        )
    if need is HostLengthNeed.BOUND and batch.host_lens is None:
        raise HostLengthError(
            f"{name} needs bounds of the lengths on the host",
            asked=None,
            allowed="Exact or UpperBound",
            hint="host_lens=UpperBound(max_seq_len, max_extend_len)",
        )
    if batch.forward_mode is ForwardMode.MIXED and traits.mixed is MixedSupport.REFUSED:
        raise FeatureError(
            f"{name} runs no mixed batches",
            asked="MIXED",
            allowed="EXTEND and DECODE",
            hint="run the prefill chunks and the decode rows as two batches",
        )
    if batch.mask is not None:
        yield Feature.EXPLICIT_MASK, "an explicit mask"
    elif batch.forward_mode is ForwardMode.DLLM_EXTEND:
        yield Feature.BIDIRECTIONAL, "a block whose tokens see each other"
    if batch.forward_mode is ForwardMode.TARGET_VERIFY:
        check_drafts(batch, limits.max_draft_tokens)
        if isinstance(batch.mask, VerifyMask):
            yield Feature.TREE_VERIFY, "a tree of draft tokens"
        if is_ragged(batch):
            yield Feature.RAGGED_VERIFY, "draft lengths that differ"
