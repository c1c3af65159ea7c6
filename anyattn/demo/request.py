"""One request on its way through the engine, and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from anyattn.core.kv.allocator import slot_range
from anyattn.demo.sampler import SamplingParams

__all__ = ["Chunk", "Completion", "GenerationRequest"]


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        ids: new tokens, the end-of-answer token included where one was sampled.
        reason: `eos` or `length`.
        reused_tokens: prompt tokens whose KV was found in the prefix cache at first admission.
        preemptions: how often the request lost its pages to an older one.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    reason: str
    reused_tokens: int
    preemptions: int


@dataclass(eq=False)
class GenerationRequest:
    """State of a request. Owned by the scheduler while it waits or runs.

    Attributes:
        tokens: prompt and new tokens so far. `computed`: how many of them have their KV in the pool.
        pages: pages of the pool, in sequence order; `row`: its row of the request table (-1 = none);
            the first `listed` pages are entered in that row.
        keys: prefix keys of the full pages of `tokens`; the first `published` of them are offered.
        prefilling: True from admission until the step that samples its next token.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    tokens: list[int] = field(init=False)
    generator: torch.Generator = field(init=False)
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    row: int = -1
    listed: int = 0
    keys: list[bytes] = field(default_factory=list)
    published: int = 0
    prefilling: bool = True
    reused_tokens: int | None = None
    preemptions: int = 0
    reason: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        self.generator = self.params.generator()

    @property
    def new_ids(self) -> list[int]:
        """Tokens sampled so far."""
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_new(self) -> int:
        """How many tokens were sampled so far."""
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def most_kv_tokens(self) -> int:
        """KV tokens of the longest possible run: the last sampled token's KV is never written."""
        return len(self.prompt_ids) + self.params.max_new_tokens - 1

    def completion(self) -> Completion:
        """The result; only once `reason` is set."""
        assert self.reason is not None
        return Completion(
            tuple(self.prompt_ids),
            tuple(self.new_ids),
            self.reason,
            self.reused_tokens or 0,
            self.preemptions,
        )


@dataclass(frozen=True)
class Chunk:
    """Tokens `start .. start + length - 1` of a request, computed in one step.

    `samples`: they end with the last token that is known, so the step yields the next one.
    """

    request: GenerationRequest
    start: int
    length: int
    samples: bool

    @staticmethod
    def of(request: GenerationRequest, length: int) -> Chunk:
        """The next `length` tokens of a request that have no KV yet."""
        start = request.computed
        return Chunk(request, start, length, start + length == len(request.tokens))

    @property
    def stop(self) -> int:
        """Tokens of the request that have KV after the step."""
        return self.start + self.length

    @property
    def token_ids(self) -> list[int]:
        """Input ids."""
        return self.request.tokens[self.start : self.stop]

    def slots(self, page_size: int) -> list[int]:
        """Where the KV of these tokens goes."""
        return slot_range(self.request.pages, self.start, self.stop, page_size)
