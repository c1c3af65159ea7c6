"""The `torch.compile` op: `anyattn::attention(q, k, v, out!, lse!, layer_key, save_kv_cache)`.

Compiled code cannot carry plans or backends, so the op finds both in the forward context at run time.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from anyattn.core.context import current_context

if TYPE_CHECKING:
    from anyattn.core.layer import AttentionLayer

__all__ = ["attention", "register_layer"]

_keys = itertools.count()
_layers: weakref.WeakValueDictionary[int, AttentionLayer] = weakref.WeakValueDictionary()


def register_layer(layer: AttentionLayer) -> int:
    """A process-wide integer that stands for the layer in compiled code, while the layer lives."""
    key = next(_keys)
    _layers[key] = layer
    return key


@torch.library.custom_op("anyattn::attention", mutates_args=("out", "lse"))
def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layer_key: int,
    save_kv_cache: bool,
) -> None:
    """Run the layer with this key on the current context's plan; results go to `out` and `lse`."""
    context = current_context()
    context.backend.forward(
        q, k, v, _layers[layer_key], context.plan.batch,
        save_kv_cache=save_kv_cache, return_lse=lse is not None, out=out, lse_out=lse, plan=context.plan,
    )  # fmt: skip


@attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layer_key: int,
    save_kv_cache: bool,
) -> None:
    """Nothing to compute: the outputs' shapes are the caller's."""
