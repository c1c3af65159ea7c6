"""anyattn: the attention layer for LLM inference that runs on whatever accelerator is there.

Everything public is loaded on first use, so that importing the package costs nothing and touches no
vendor library and no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyattn.api import select
    from anyattn.core import kv, speculative
    from anyattn.core.assemble import create_backend, create_draft_backend
    from anyattn.core.batch import Exact, ExplicitMask, ForwardBatch, ForwardMode, UpperBound
    from anyattn.core.call import LayerInputs, LayerOutput
    from anyattn.core.capabilities import Feature
    from anyattn.core.context import current_context, forward_context
    from anyattn.core.layer import AttentionLayer
    from anyattn.core.masks import TreeMaskMode, VerifyMask
    from anyattn.core.measure.bucket import Workload
    from anyattn.core.mla import MLAMethod, MLAPolicy
    from anyattn.core.mla_layer import MLAAttention, MLAProjections
    from anyattn.core.select.decision import Decision
    from anyattn.core.spec import AttentionKind, AttentionSpec, Limits, MLASpec
    from anyattn.core.state import AttentionState
    from anyattn.errors import AnyattnError

__version__ = "0.1.0"

_HOMES = {
    "AnyattnError": "anyattn.errors",
    "AttentionKind": "anyattn.core.spec",
    "AttentionLayer": "anyattn.core.layer",
    "AttentionSpec": "anyattn.core.spec",
    "AttentionState": "anyattn.core.state",
    "Decision": "anyattn.core.select.decision",
    "Exact": "anyattn.core.batch",
    "ExplicitMask": "anyattn.core.batch",
    "Feature": "anyattn.core.capabilities",
    "ForwardBatch": "anyattn.core.batch",
    "ForwardMode": "anyattn.core.batch",
    "LayerInputs": "anyattn.core.call",
    "LayerOutput": "anyattn.core.call",
    "Limits": "anyattn.core.spec",
    "MLAAttention": "anyattn.core.mla_layer",
    "MLAMethod": "anyattn.core.mla",
    "MLAPolicy": "anyattn.core.mla",
    "MLAProjections": "anyattn.core.mla_layer",
    "MLASpec": "anyattn.core.spec",
    "TreeMaskMode": "anyattn.core.masks",
    "UpperBound": "anyattn.core.batch",
    "VerifyMask": "anyattn.core.masks",
    "Workload": "anyattn.core.measure.bucket",
    "create_backend": "anyattn.core.assemble",
    "create_draft_backend": "anyattn.core.assemble",
    "current_context": "anyattn.core.context",
    "forward_context": "anyattn.core.context",
    "kv": "anyattn.core",
    "select": "anyattn.api",
    "speculative": "anyattn.core",
}

__all__ = [
    "AnyattnError",
    "AttentionKind",
    "AttentionLayer",
    "AttentionSpec",
    "AttentionState",
    "Decision",
    "Exact",
    "ExplicitMask",
    "Feature",
    "ForwardBatch",
    "ForwardMode",
    "LayerInputs",
    "LayerOutput",
    "Limits",
    "MLAAttention",
    "MLAMethod",
    "MLAPolicy",
    "MLAProjections",
    "MLASpec",
    "TreeMaskMode",
    "UpperBound",
    "VerifyMask",
    "Workload",
    "__version__",
    "create_backend",
    "create_draft_backend",
    "current_context",
    "forward_context",
    "kv",
    "select",
    "speculative",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'anyattn' has no attribute {name!r}")
    if name in ("kv", "speculative"):
        value: Any = importlib.import_module(f"anyattn.core.{name}")
    else:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
