"""Text in, text out: the demo model, its tokenizer and an engine sized for the prompts at hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.model import LlamaModel
from anyattn.demo.request import Completion, GenerationRequest
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.scheduler import Step
from anyattn.demo.speculative import make_engine
from anyattn.demo.tokenizer import Tokenizer
from anyattn.demo.weights import find_gguf, load_gguf
from anyattn.errors import ConfigError

__all__ = ["Answer", "Session"]


@dataclass(frozen=True)
class Answer:
    """One prompt's continuation. `prompt_ids` include a chat template's tokens where one was applied."""

    prompt: str
    prompt_ids: list[int]
    ids: list[int]
    text: str
    completion: Completion

    def to_json(self) -> dict[str, Any]:
        """Plain values: `prompt, prompt_ids, ids, text`."""
        return {"prompt": self.prompt, "prompt_ids": self.prompt_ids, "ids": self.ids, "text": self.text}


class Session:
    """The demo model, loaded once.

    Attributes:
        load_seconds: what loading took. first_token_seconds: of the last `complete`, from its start.
        engine: of the last `complete`, with its decision and statistics.
    """

    def __init__(self, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        """Raises `LibraryError` where the weights or their readers are not installed."""
        started = time.perf_counter()
        checkpoint = load_gguf(find_gguf())
        self.tokenizer = Tokenizer(checkpoint.metadata)
        self.model = LlamaModel(checkpoint, dtype=dtype, device=device)
        self.load_seconds = time.perf_counter() - started
        self.first_token_seconds = 0.0
        self.engine: Engine | None = None

    def complete(
        self,
        prompts: Sequence[str],
        params: SamplingParams,
        config: EngineConfig,
        *,
        chat: bool = False,
        progress: bool = False,
        on_ready: Callable[[Engine], None] | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> list[Answer]:
        """Continue all prompts in one continuous batch.

        Args:
            params: for all prompts; each draws from a seed of its own, `params.seed + index`.
            config: sizes and choices; `max_context` and the pool are fitted to the prompts where they are
                left at their defaults.
            chat: wrap each prompt as a user's message.
            progress: a bar on standard error, if that is a terminal.
            on_ready: called with the engine before its first step.
            on_text: called with the first prompt's answer so far whenever it has grown.

        Raises:
            ConfigError, PoolError, SelectionError: what can't be served.
        """
        ids = [self.tokenizer.encode(self._wrapped(p) if chat else p) for p in prompts]
        fitted = _fitted(config, ids, params, self.model.max_context)
        engine = make_engine(self.model, fitted, eos_id=self.tokenizer.eos_id)
        self.engine = engine
        if on_ready is not None:
            on_ready(engine)
        each = [replace(params, seed=params.seed + index) for index in range(len(ids))]
        bar = _Progress(len(ids) * params.max_new_tokens, shown=progress)
        first = _FirstAnswer(self.tokenizer, ids[0] if ids else [])
        started = time.perf_counter()
        self.first_token_seconds = 0.0

        def on_step(step: Step, finished: list[GenerationRequest]) -> None:
            new = sum(c.samples for c in step.chunks)
            if new and not self.first_token_seconds:
                self.first_token_seconds = time.perf_counter() - started
            bar.advance(new, finished)
            if on_text is not None and first.grew(step):
                on_text(first.text)

        with bar:
            found = engine.generate(ids, each, on_step=on_step)
        return [
            Answer(prompt, list(c.prompt_ids), list(c.ids), self.tokenizer.decode(c.ids), c)
            for prompt, c in zip(prompts, found, strict=True)
        ]

    def _wrapped(self, prompt: str) -> str:
        return self.tokenizer.chat([{"role": "user", "content": prompt}])


class _FirstAnswer:
    """The answer to the first prompt while it is being written."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.text = ""
        self._tokenizer, self._prompt_ids = tokenizer, list(prompt_ids)
        self._request: GenerationRequest | None = None

    def grew(self, step: Step) -> bool:
        """Look at a computed step: True if `text` is longer now. Half a character waits for its rest."""
        if self._request is None:
            mine = (c.request for c in step.chunks if list(c.request.prompt_ids) == self._prompt_ids)
            self._request = next(mine, None)
        ids = [] if self._request is None else self._request.new_ids
        text = self._tokenizer.decode(ids).rstrip("\ufffd")
        longer = len(text) > len(self.text)
        self.text = text if longer else self.text
        return longer


def _fitted(
    config: EngineConfig, prompts: Sequence[Sequence[int]], params: SamplingParams, most: int
) -> EngineConfig:
    """No more rows and context than these prompts can use, and no more than `most`, the model's own."""
    longest = max((len(ids) for ids in prompts), default=1) + params.max_new_tokens
    if longest - 1 > most:  # the last token's KV is never written
        raise ConfigError(
            "prompt and answer are longer than the model's context",
            asked=f"{longest - params.max_new_tokens} + {params.max_new_tokens} tokens",
            allowed=f"{most} tokens",
            hint="shorten the prompt, or ask for fewer with --max-new-tokens",
        )
    longest = min(longest, most)
    batch = min(config.max_batch, max(1, len(prompts)))
    context = longest if config.max_context is None else config.max_context
    chunk = context * batch if config.chunk is None else min(config.chunk, context * batch)
    return replace(config, max_batch=batch, max_context=context, chunk=chunk)


class _Progress:
    """New tokens against the most there can be; silent without a terminal or without tqdm."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, unit="tok", file=sys.stderr, leave=False)

    def advance(self, new: int, finished: Sequence[GenerationRequest]) -> None:
        """Count new tokens, and those that finished requests will not need."""
        if self._bar is not None:
            unused = sum(r.params.max_new_tokens - len(r.new_ids) for r in finished)
            self._bar.update(new + unused)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
