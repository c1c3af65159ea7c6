"""Served latent layers of DeepSeek's sizes on stand-ins: one decision, several layers, steps by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import anyattn
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.mla_layer import MLAProjections
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.selecting import select_for

SIZES: dict[str, Any] = {
    "rank": 512, "rope": 64, "nope": 128, "v_dim": 128, "num_q_heads": 16, "page_size": 64,
    "dtype": "bfloat16", "kv_dtype": "bfloat16",
}  # fmt: skip


def case(mode: str, prefix: tuple[int, ...], extend: tuple[int, ...], **fields: Any) -> MLACase:
    """A case of those sizes."""
    return MLACase(**{**SIZES, "mode": mode, "prefix_lens": prefix, "extend_lens": extend, **fields})


class Served:
    """A backend with `layers` latent layers; request i owns page-aligned slots, its latents are random."""

    def __init__(
        self, host: str, *, layers: int = 1, heads: int = 16, kv_dtype: str = "bfloat16",
        window: int | None = None, **roles: str,
    ) -> None:  # fmt: skip
        self.spec = anyattn.AttentionSpec(
            num_q_heads=heads, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5,
            sliding_window=window, mla=anyattn.MLASpec(),
        )  # fmt: skip
        self.limits = anyattn.Limits(max_requests=4, max_tokens=64, max_context=256, max_draft_tokens=4)
        decision = select_for(
            [self.spec] * layers, device="cpu", host=host, dtype="bfloat16", kv_dtype=kv_dtype, page_size=64,
            limits=self.limits, **roles,
        )  # fmt: skip
        pool = anyattn.kv.create_pool(decision, num_slots=16 * 64)
        assert isinstance(pool, MLAPool)
        self.pool, self.heads = pool, heads
        self.table = anyattn.kv.RequestTable(max_requests=4, max_context=256, device="cpu")
        for row in range(4):
            self.table.req_to_token[row] = 64 + 256 * row + torch.arange(256)
        self.generator = torch.Generator().manual_seed(7)
        for layer in range(layers):
            latents = torch.randn(16 * 64, 1, 576, generator=self.generator).to(torch.bfloat16)
            pool.write(layer, torch.arange(64, 64 + 16 * 64), latents)
        self.backend = anyattn.create_backend(decision, pool, self.table)
        weights = (torch.randn(heads, 128, 512, generator=self.generator).to(torch.bfloat16) for _ in "kv")
        projections = MLAProjections(*weights)
        self.layers = [anyattn.AttentionLayer(self.spec, i, mla_expand=projections) for i in range(layers)]

    def decode(self, lens: Sequence[int]) -> anyattn.ForwardBatch:
        """One token for request 0, 1, …; `lens` count it. Nothing is stored twice: pass no k."""
        slots = [64 + 256 * row + n - 1 for row, n in enumerate(lens)]
        return anyattn.ForwardBatch.decode(list(range(len(lens))), list(lens), slots)

    def verify(self, prefix: Sequence[int], drafts: Sequence[int]) -> anyattn.ForwardBatch:
        """A chain of drafts for request 0, 1, …"""
        slots = [
            64 + 256 * row + p + i
            for row, (p, d) in enumerate(zip(prefix, drafts, strict=True))
            for i in range(d)
        ]
        return anyattn.ForwardBatch.verify(list(range(len(prefix))), list(prefix), list(drafts), slots)

    def run(self, batch: anyattn.ForwardBatch, plan: Any, layer: int = 0, **options: Any) -> Any:
        """The layer over stored latents, with random queries."""
        q = torch.randn(batch.num_tokens, self.heads, 576, generator=self.generator).to(torch.bfloat16)
        with anyattn.forward_context(self.backend, plan):
            return self.layers[layer](q, None, None, batch, **options)

    def step(self, batch: anyattn.ForwardBatch, **options: Any) -> Any:
        """Prepared and run eagerly."""
        return self.run(batch, self.backend.init_forward_metadata(batch), **options)


def watch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[dict[str, Any]]:
    """Arguments of every call from now on, by name; the signature stays what it is."""
    made: list[dict[str, Any]] = []
    original: Callable[..., Any] = getattr(owner, name)
    signature = inspect.signature(original)

    def watched(*args: Any, **keywords: Any) -> Any:
        made.append(dict(signature.bind(*args, **keywords).arguments))
        return original(*args, **keywords)

    watched.__signature__ = signature  # type: ignore[attr-defined]
    monkeypatch.setattr(owner, name, watched)
    return made
