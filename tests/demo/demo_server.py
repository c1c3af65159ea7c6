"""Engines over one model, as the demo's tests want them."""

from __future__ import annotations

from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.model import LlamaModel
from anyattn.demo.request import Completion
from anyattn.demo.sampler import SamplingParams


class Server:
    """Engines over one model, with the tokenizer's end token."""

    def __init__(self, model: LlamaModel, eos_id: int) -> None:
        self.model, self.eos_id = model, eos_id

    def engine(self, **options: object) -> Engine:
        """An engine on torch_native with a context of 256."""
        config = {"max_context": 256, "backend": "torch_native", "page_size": 16} | options
        return Engine(self.model, EngineConfig(**config), eos_id=self.eos_id)  # type: ignore[arg-type]

    def generate(
        self, prompts: list[list[int]], count: int, **options: object
    ) -> tuple[list[Completion], Engine]:
        """Greedy continuations of `count` tokens, and the engine that made them."""
        engine = self.engine(**options)
        return engine.generate(prompts, SamplingParams(max_new_tokens=count)), engine
