"""What may be captured and what may be replayed: every refusal of the graph logic, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.graph.buckets import GraphKey
from anyattn.core.masks import VerifyMask
from anyattn.core.spec import Limits
from anyattn.core.traits import GraphSupport
from anyattn.errors import GraphError

__all__ = ["CAPTURABLE", "check_capturable", "check_replayable", "example_batch"]

CAPTURABLE = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
"""Modes whose steps have one number of tokens a request. Prefill has other graphs."""


def check_capturable(backend: Any, mode: ForwardMode, tokens: int, limits: Limits) -> None:
    """Raises `GraphError`: a mode without a full graph, a backend that can't, more tokens than the limits."""
    if mode not in CAPTURABLE:
        raise GraphError(
            f"{mode.value} steps have no full graph: their token counts differ from step to step",
            asked=mode.value,
            allowed=", ".join(m.value for m in CAPTURABLE),
            hint="run it eagerly, or in piecewise or breakable graphs",
        )
    if backend.traits(mode).graph is GraphSupport.NEVER:
        raise GraphError(
            f"{_serving(backend, mode)} can't be captured in {mode.value}",
            asked=f"a graph of {mode.value}",
            allowed="backends whose rows declare graphs (`anyattn backends`)",
            hint="run it eagerly, or choose another backend for this phase: select(decode=…)",
        )
    most = 1 if mode is ForwardMode.DECODE else max(1, limits.max_tokens)
    if not 1 <= tokens <= most:
        raise GraphError("tokens per request of a captured step", asked=tokens, allowed=f"1..{most}")


def _serving(backend: Any, mode: ForwardMode) -> str:
    serving = backend.child(mode) if hasattr(backend, "child") else backend
    name: str = serving.config.name
    return name


def check_replayable(
    batch: ForwardBatch, masks: Mapping[tuple[ForwardMode, int], VerifyMask | None]
) -> tuple[int, str]:
    """`(tokens per request, form of its mask)` of a batch that may run in a graph.

    Raises:
        GraphError: an empty batch, lengths that differ, an explicit mask of each step's own size, another
            verify mask than the captured one, encoder tokens that are stored in this step.
    """
    if batch.batch_size == 0:
        raise GraphError(
            "an empty step", asked=batch.forward_mode.value, allowed="one request or more", hint="run nothing"
        )
    tokens, rest = divmod(batch.num_tokens, batch.batch_size)
    lens = None if batch.exact is None else batch.exact.extend_lens
    drafts = batch.forward_mode is not ForwardMode.DECODE  # whose requests have one token each, always
    if rest or (drafts and lens is not None and bool((lens != tokens).any())):
        raise GraphError(
            "requests of a captured step have one number of tokens",
            asked=f"{batch.num_tokens} tokens of {batch.batch_size} requests",
            allowed="the same number for each",
            hint="pad the drafts, or run this step eagerly",
        )
    captured = (batch.forward_mode, tokens) in masks
    mask = _mask_form(batch, masks[batch.forward_mode, tokens]) if captured else "none"
    if batch.encoder_out_cache_loc is not None:
        raise GraphError(
            "encoder tokens are stored in this step",
            asked="encoder_out_cache_loc",
            allowed="steps that read encoder KV which is stored already",
            hint="store the encoder's KV in an eager step",
        )
    return tokens, mask


def _mask_form(batch: ForwardBatch, captured: VerifyMask | None) -> str:
    mask = batch.mask
    if mask is None and captured is None:
        return "none"
    if isinstance(mask, VerifyMask) and captured is not None and _same_buffer(mask, captured):
        return mask.mode.value
    raise GraphError(
        "another mask than the graph was captured with",
        asked="no mask" if mask is None else type(mask).__name__,
        allowed="no mask" if captured is None else "the captured VerifyMask, filled in place",
        hint="runner.capture(…, mask=verify_mask); fill_tree_mask(verify_mask, …) before each replay",
    )


def _same_buffer(a: VerifyMask, b: VerifyMask) -> bool:
    return a.mode is b.mode and a.buffer.data_ptr() == b.buffer.data_ptr()


def example_batch(key: GraphKey, mask: VerifyMask | None) -> ForwardBatch:
    """A batch with the fields that every step of the mode has; a tree has positions of its own."""
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    return ForwardBatch(
        forward_mode=key.mode,
        req_pool_indices=none,
        seq_lens=none,
        extend_seq_lens=none,
        out_cache_loc=none,
        num_tokens=0,
        positions=None if mask is None else none,
        mask=mask,
    )
