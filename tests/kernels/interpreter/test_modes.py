"""The `triton` backend in the rarer modes and kinds."""

from __future__ import annotations

import pytest

from anyattn.testing.interpreter import offer_triton
from anyattn.testing.mode_runs import MODE_RUNS, cross_attention

offer_triton()


@pytest.mark.parametrize("run", MODE_RUNS)
def test_every_step_agrees_with_the_oracle(run: str) -> None:
    assert MODE_RUNS[run](backend="triton") < 2e-5


@pytest.mark.parametrize("page_size", [1, 16])
def test_cross_attention_at_any_page_size(page_size: int) -> None:
    assert cross_attention(page_size=page_size, backend="triton") < 2e-5
