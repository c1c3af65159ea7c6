"""What the bad-input tests share: the check of an error, a ready backend, one small step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import anyattn
from anyattn import errors

SPEC = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
LIMITS = anyattn.Limits(max_requests=4, max_tokens=64, max_context=32)


@contextmanager
def refused(kind: type[errors.AnyattnError], *words: str, without: str = "") -> Iterator[None]:
    """The block raises exactly this class, with asked / allowed / next, and these words in the text.

    `without` names the part that can't be there ("allowed" where nothing is).
    """
    with pytest.raises(errors.AnyattnError) as caught:
        yield
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for part, value in (("asked", error.asked), ("allowed", error.allowed), ("next", error.hint)):
        assert value is not None or part in without, f"no {part!r} in: {error}"
    for word in words:
        assert word in str(error), f"{word!r} is missing in: {error}"


def select(**changes: Any) -> anyattn.Decision:
    options = {
        "dtype": torch.float32,
        "device": "cpu",
        "backend": "torch_native",
        "page_size": 4,
        "limits": LIMITS,
    }
    return anyattn.select([SPEC], **(options | changes))


class Engine:
    """A ready backend with one request of 6 tokens in row 1, slots 4 .. 9 and room for more."""

    def __init__(self, specs: list[anyattn.AttentionSpec] | None = None, **changes: Any) -> None:
        options = {"dtype": torch.float32, "device": "cpu", "backend": "torch_native", "page_size": 4}
        self.specs = specs or [SPEC]
        self.decision = anyattn.select(self.specs, **(options | changes))
        self.pool = anyattn.kv.create_pool(self.decision, num_slots=64)
        self.table = anyattn.kv.RequestTable(max_requests=4, max_context=32, device="cpu", max_encoder=8)
        self.table.req_to_token[1, :16] = torch.arange(4, 20)
        self.table.req_to_token[2, :16] = torch.arange(20, 36)
        self.table.encoder_to_token[1, :8] = torch.arange(36, 44)
        self.backend = anyattn.create_backend(self.decision, self.pool, self.table)
        self.layer = anyattn.AttentionLayer(self.specs[0], 0)

    def plan(self, batch: anyattn.ForwardBatch) -> Any:
        return self.backend.init_forward_metadata(batch)

    def call(
        self,
        batch: anyattn.ForwardBatch | None = None,
        *,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: anyattn.AttentionLayer | None = None,
        **options: Any,
    ) -> Any:
        """An extend of 3 tokens, with whatever the test replaces."""
        batch = batch or extend()
        q = torch.randn(3, 4, 16) if q is None else q
        k = torch.randn(3, 2, 16) if k is None else k
        v = torch.randn(3, 2, 16) if v is None else v
        with anyattn.forward_context(self.backend, self.plan(batch)):
            return (layer or self.layer)(q, k, v, batch, **options)


def extend(**changes: Any) -> anyattn.ForwardBatch:
    fields = {
        "req_pool_indices": [1],
        "prefix_lens": [3],
        "extend_lens": [3],
        "out_cache_loc": [7, 8, 9],
    }
    return anyattn.ForwardBatch.extend(**(fields | changes))
