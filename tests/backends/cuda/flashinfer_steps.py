"""Small steps of the `flashinfer` adapter on its stand-in, with every call of the library written down."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.cuda.flashinfer import FlashInfer
from anyattn.testing.selecting import select_for

__all__ = ["Calls", "Setting", "spec", "watched"]

WRAPPERS = {
    "decode": "BatchDecodeWithPagedKVCacheWrapper",
    "paged": "BatchPrefillWithPagedKVCacheWrapper",
    "ragged": "BatchPrefillWithRaggedKVCacheWrapper",
    "sinks": "BatchAttentionWithAttentionSinkWrapper",
}


class Calls(list[tuple[str, str, Any, tuple[Any, ...], dict[str, Any]]]):
    """`(role, "make" | "plan" | "run", wrapper, positional, keywords)` in order."""

    def of(self, what: str) -> list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
        """Calls of one kind, without its name."""
        return [(role, *rest) for role, kind, *rest in self if kind == what]


def watched(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Writes down what the stand-in's wrappers are given."""
    library, calls = sys.modules["flashinfer"], Calls()
    # Whoever keeps a class keeps its closures; the wrappers in `calls` hold workspaces of 128 MiB each.
    written = weakref.ref(calls)

    def write(role: str, what: str, wrapper: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = written()
        if found is not None:
            found.append((role, what, wrapper, args, kwargs))

    for role, name in WRAPPERS.items():
        real = getattr(library, name)

        class Watched(real):  # type: ignore[misc, valid-type]
            _role = role

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                write(self._role, "make", self, args, kwargs)
                super().__init__(*args, **kwargs)

            def plan(self, *args: Any, **kwargs: Any) -> Any:
                write(self._role, "plan", self, args, kwargs)
                return super().plan(*args, **kwargs)

            def run(self, *args: Any, **kwargs: Any) -> Any:
                write(self._role, "run", self, args, kwargs)
                return super().run(*args, **kwargs)

        monkeypatch.setattr(library, name, Watched)
    return calls


def spec(**changes: Any) -> anyattn.AttentionSpec:
    """Eight query heads over two, D 64."""
    return anyattn.AttentionSpec(**{"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64} | changes)


class Setting:
    """A pool of pages of 4 with rows 0 .. 3 holding 48 tokens each, all stored, and a backend on it."""

    def __init__(
        self,
        specs: Sequence[anyattn.AttentionSpec],
        *,
        host: str = "cuda:sm90",
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.specs = list(specs)
        decision = select_for(
            self.specs, device="cpu", host=host, dtype=torch.bfloat16, backend="flashinfer", page_size=4,
            limits=anyattn.Limits(4, 96, 64, 8), **options,
        )  # fmt: skip
        self.pool = anyattn.kv.create_pool(decision, num_slots=4 * 64)
        self.table = anyattn.kv.RequestTable(max_requests=4, max_context=64)
        for row in range(4):
            self.table.req_to_token[row] = torch.arange(64) + 4 + 64 * (3 - row)
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        assert isinstance(self.backend, FlashInfer)
        self.layers = [anyattn.AttentionLayer(s, i, sinks=_sinks(s)) for i, s in enumerate(self.specs)]
        everywhere = torch.arange(4, self.pool.total_slots)
        for i, s in enumerate(self.specs):
            k = torch.randn(len(everywhere), s.num_kv_heads, s.head_dim).bfloat16()
            self.pool.write(i, everywhere, k, torch.randn_like(k))

    def slots(self, rows: Sequence[int], prefix: Sequence[int], extend: Sequence[int]) -> list[int]:
        """Where new tokens go."""
        return [int(self.table.req_to_token[r, p + i]) for r, p, e in zip(rows, prefix, extend, strict=True)
                for i in range(e)]  # fmt: skip

    def extend(self, prefix: Sequence[int], extend: Sequence[int], **options: Any) -> anyattn.ForwardBatch:
        """New tokens for rows 0, 1, …"""
        rows = list(range(len(prefix)))
        return anyattn.ForwardBatch.extend(
            rows, list(prefix), list(extend), self.slots(rows, prefix, extend), **options
        )

    def decode(self, *seq_lens: int) -> anyattn.ForwardBatch:
        """One token for rows 0, 1, …"""
        rows, prefix = list(range(len(seq_lens))), [n - 1 for n in seq_lens]
        return anyattn.ForwardBatch.decode(rows, list(seq_lens), self.slots(rows, prefix, [1] * len(rows)))

    def run(self, batch: anyattn.ForwardBatch, layer: int = 0, plan: Any = None, **options: Any) -> Any:
        """Plan (unless planned) and attend in one layer, with random q, k and v of a fixed seed."""
        plan = plan or self.backend.init_forward_metadata(batch)
        s = self.specs[layer]
        draw = torch.Generator().manual_seed(batch.num_tokens)
        q, k, v = (
            torch.randn(batch.num_tokens, heads, s.head_dim, generator=draw).bfloat16()
            for heads in (s.num_q_heads, s.num_kv_heads, s.num_kv_heads)
        )
        with anyattn.forward_context(self.backend, plan):
            return self.layers[layer](q, k, v, batch, **options)


def _sinks(s: anyattn.AttentionSpec) -> torch.Tensor | None:
    return torch.linspace(-1, 1, s.num_q_heads) if s.sinks else None
