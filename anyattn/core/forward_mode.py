"""`ForwardMode`: what kind of step a batch is."""

from __future__ import annotations

from enum import Enum

__all__ = ["ForwardMode"]


class ForwardMode(Enum):
    """What kind of step this is. `seq_lens` includes the step's own tokens in every mode.

    SPLIT_PREFILL is an EXTEND whose layers run in ranges, with other steps in between: its plan lives in
    storage of its own. DLLM_EXTEND computes a block of a block-diffusion model: without a mask, causal layers
    attend as bidirectional ones (several blocks in a step: `block_causal_mask`).
    """

    DECODE = "decode"
    EXTEND = "extend"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT_EXTEND = "draft_extend"
    SPLIT_PREFILL = "split_prefill"
    DLLM_EXTEND = "dllm_extend"

    __hash__ = object.__hash__  # members are singletons; Enum's own hash is a Python call
