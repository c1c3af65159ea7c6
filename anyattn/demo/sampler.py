"""From logits to tokens: greedy, or temperature and nucleus sampling with a generator per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from anyattn.errors import ConfigError

__all__ = ["SamplingParams", "choose", "sample"]


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
        max_new_tokens: upper bound of the answer.
        temperature: 0 = greedy.
        top_p: sample from the smallest set of tokens that holds this much probability (arXiv 1904.09751).
        seed: of the request's own generator: its draws don't depend on who else is in the batch.
        ignore_eos: go on after the end-of-answer token (for measurements).

    Raises:
        ConfigError: values that can't be.
    """

    max_new_tokens: int = 32
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", asked=self.max_new_tokens, allowed=">= 1")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError("temperature", asked=self.temperature, allowed=">= 0 (0 = greedy)")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError("top_p", asked=self.top_p, allowed="0 < top_p <= 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", asked=self.seed, allowed="0 .. 2^63 - 1")

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self.temperature == 0.0

    def generator(self) -> torch.Generator:
        """A fresh CPU generator with this seed."""
        return torch.Generator().manual_seed(self.seed)


def choose(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> torch.Tensor:
    """One token per row of `logits [N, vocab]`: int64 `[N]`, where the logits are."""
    greedy = logits.argmax(dim=-1)
    for row, (param, generator) in enumerate(zip(params, generators, strict=True)):
        if not param.greedy:
            draw = float(torch.rand((), generator=generator, dtype=torch.float64))
            greedy[row] = _draw(logits[row], param, draw)
    return greedy


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]
) -> list[int]:
    """As `choose`, with one transfer to the host for the whole step."""
    return [int(token) for token in choose(logits, params, generators).tolist()]


def _draw(logits: torch.Tensor, param: SamplingParams, draw: float) -> torch.Tensor:
    """The token at quantile `draw` of the nucleus, likeliest first. Stays on the device."""
    scaled, order = (logits / param.temperature).sort(descending=True)
    probabilities = scaled.softmax(dim=-1, dtype=torch.float64)
    cumulative = probabilities.cumsum(dim=-1)
    inside = (cumulative - probabilities) < param.top_p  # the first token is always inside
    nucleus = (probabilities * inside).cumsum(dim=-1)
    index = torch.searchsorted(nucleus, draw * nucleus[-1:], right=True)
    return order[index.clamp_max(inside.sum() - 1)].squeeze(0)
