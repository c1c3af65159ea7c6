"""What the engine asks of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from anyattn.core.batch import ForwardBatch
from anyattn.core.spec import AttentionSpec

__all__ = ["Decoder"]


class Decoder(Protocol):
    """A decoder whose layers are `anyattn.AttentionLayer`s: `LlamaModel`, `GemmaModel`."""

    max_context: int
    dtype: torch.dtype
    device: torch.device

    @property
    def specs(self) -> Sequence[AttentionSpec]:
        """One a layer."""

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch, rows: torch.Tensor
    ) -> torch.Tensor:
        """float32 logits `[N, vocab]` of the tokens `rows [N]` of a step."""
