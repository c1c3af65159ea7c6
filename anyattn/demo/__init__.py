"""A small real model served through the package: weights, tokenizer, model, sampler, scheduler, engine."""

from __future__ import annotations

from anyattn.demo.engine import Engine, EngineConfig, EngineStats
from anyattn.demo.request import Completion, GenerationRequest
from anyattn.demo.sampler import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "EngineStats", "GenerationRequest", "SamplingParams"]
