"""Which features a layer's spec asks for: one function for selection and for the call."""

from __future__ import annotations

import math

from anyattn.core.capabilities import Feature
from anyattn.core.spec import AttentionKind, AttentionSpec

__all__ = ["layer_features"]

_KINDS = {
    AttentionKind.BIDIRECTIONAL: Feature.BIDIRECTIONAL,
    AttentionKind.ENCODER_ONLY: Feature.ENCODER_ONLY,
    AttentionKind.CROSS: Feature.CROSS,
}


def layer_features(spec: AttentionSpec) -> tuple[Feature, ...]:
    """Everything beyond plain causal attention that the spec needs."""
    wanted = [_KINDS[spec.kind]] if spec.kind in _KINDS else []
    if spec.sliding_window is not None:
        wanted.append(Feature.WINDOW)
    if spec.logit_cap is not None:
        wanted.append(Feature.LOGIT_CAP)
    if spec.sinks:
        wanted.append(Feature.SINKS)
    if spec.mla is None and not math.isclose(spec.scale, 1.0 / math.sqrt(spec.head_dim), rel_tol=1e-6):
        wanted.append(Feature.CUSTOM_SCALE)
    return tuple(wanted)
