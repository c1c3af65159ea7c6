"""What a dtype costs the demo model by itself, and so how far a backend's logits may be from float32.

Every rounding but attention's own happens here, too: the model runs in its dtype, its attention in float64 on
the rounded q, k and v, and the result is rounded once. How far these logits are from float32's is the floor
under any backend. A kernel adds one rounding, that of the weights of V, to some ten of a layer (two norms,
rotary embedding, five products, the activation, two sums): a twentieth of the floor in the mean. So the root
mean square over all logits may be a quarter above the floor's. The largest difference is one of a long tail,
which another order of the same roundings moves by a third (the four worst positions of SmolLM2 in bfloat16
have 4.2e-2, 4.0e-2, 3.6e-2, 3.3e-2 of the range): it may be half above the floor's. float32 has fixed bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import anyattn
from anyattn.core.spec import AttentionSpec
from anyattn.demo.model import LlamaModel

__all__ = ["EXACT", "Bounds", "bounds_of", "exact_logits", "shares"]

_MAX_OVER_FLOOR = 1.5
_RMS_OVER_FLOOR = 1.25


@dataclass(frozen=True)
class Bounds:
    """Differences of logits allowed, as shares of the range (max - min) of their float32 row.

    Attributes:
        largest: of any logit; a best token is sure where float32's margin exceeds it.
        rms: root mean square over all logits.
        floor: (largest, rms) with attention in float64, None where the bounds are fixed.
    """

    largest: float
    rms: float
    floor: tuple[float, float] | None = None

    def __str__(self) -> str:
        allowed = f"allowed {self.largest:.2e}, rms {self.rms:.2e} of the range"
        if self.floor is None:
            return allowed
        largest, rms = self.floor
        return f"attention in float64 is off by {largest:.2e}, rms {rms:.2e}; {allowed}"


EXACT = Bounds(1e-4, 1e-4)
"""For float32 against float32."""


def shares(reference: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, float]:
    """(largest difference of each row `[N]`, root mean square of all), as shares of the rows' ranges.

    Infinite where a logit isn't finite.
    """
    span = (reference.amax(-1) - reference.amin(-1))[:, None]
    share = ((logits - reference) / span).abs().nan_to_num_(torch.inf, torch.inf, torch.inf)
    return share.amax(-1), float(share.double().square().mean().sqrt())


def bounds_of(model: LlamaModel, texts: Sequence[Sequence[int]], reference: torch.Tensor) -> Bounds:
    """Bounds for the model's dtype; `reference`: float32 logits `[N, vocab]` of all tokens of the texts."""
    if model.dtype == torch.float32:
        return EXACT
    rows, rms = shares(reference, torch.cat(exact_logits(model, texts)))
    largest = float(rows.max())
    return Bounds(largest * _MAX_OVER_FLOOR, rms * _RMS_OVER_FLOOR, (largest, rms))


def exact_logits(model: LlamaModel, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """float32 CPU logits `[len(text), vocab]` of each text, with attention in float64."""
    idle = anyattn.ForwardBatch.idle()
    found = []
    with _exact_attention(model):
        for text in texts:
            every = torch.arange(len(text), device=model.device)
            ids = torch.tensor(text, device=model.device)
            found.append(model.forward(ids, every, idle, every).cpu())
    return found


@contextmanager
def _exact_attention(model: LlamaModel) -> Iterator[None]:
    layers: list[Any] = list(model.layers)
    own = [layer.attention for layer in layers]
    for layer in layers:
        layer.attention = _Exact(layer.spec)
    try:
        yield
    finally:
        for layer, attention in zip(layers, own, strict=True):
            layer.attention = attention


@dataclass(frozen=True)
class _Exact:
    """In place of a layer: causal attention of one text without a cache."""

    spec: AttentionSpec

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
        """`[T, Hq, D]` in q's dtype, rounded once."""
        wide = q.double().transpose(0, 1)
        keys, values = (x.double().transpose(0, 1).repeat_interleave(self.spec.group_size, 0) for x in (k, v))
        scores = wide @ keys.transpose(1, 2) * self.spec.scale
        later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu_(1)
        weights = scores.masked_fill_(later, -torch.inf).softmax(-1)
        return (weights @ values).transpose(0, 1).to(q.dtype)
