"""`torch_native` for latent layers: both methods in plain torch, float32 accumulation."""

from __future__ import annotations

import torch

from anyattn.backends.reference.attend import attend
from anyattn.backends.reference.torch_native import TorchNative
from anyattn.core.call import AttentionCall
from anyattn.core.mla import materialised_spec
from anyattn.core.mla_keys import KeyPart
from anyattn.core.mla_prefill import run_materialised

__all__ = ["TorchNativeMLA"]


class TorchNativeMLA(TorchNative):
    """An absorbed step is plain attention over one head of `rank + rope` whose values are its first part.

    A materialised step expands, chunk by chunk where requests have a prefix.
    """

    def forward_extend(self, call: AttentionCall) -> None:
        """By the plan's method."""
        method = call.plan.mla_method
        assert method is not None
        if method.expands:
            run_materialised(call, self.pool, _ragged)
        else:
            super().forward_extend(call)


def _ragged(
    call: AttentionCall,
    k: torch.Tensor,
    v: torch.Tensor,
    part: KeyPart,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    causal: bool,
) -> None:
    """Each request alone, as `RaggedAttention` wants it."""
    spec = materialised_spec(call.layer.spec)
    queries = call.plan.host_extend_lens
    assert queries is not None
    first = 0
    for start, stop, count in zip(part.bounds, part.bounds[1:], queries, strict=False):
        rows, keys = slice(first, first + count), slice(start, stop)
        first += count
        seen = torch.ones(count, stop - start, dtype=torch.bool, device=k.device).tril() if causal else None
        attend(
            call.q[rows].float(), k[keys].float(), v[keys].float(), spec, seen, out[rows],
            None if lse is None else lse[rows], None, empty_rows=False,
        )  # fmt: skip
