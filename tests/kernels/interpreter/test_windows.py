"""The `triton` backend on dual pools: window layers reach their slots through the map, inside the kernels."""

from __future__ import annotations

import pytest

from anyattn.testing.interpreter import offer_triton
from anyattn.testing.window_runs import RUNS

offer_triton()


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("run", ["chunks", "several_sizes", "trees"])
def test_every_step_agrees_with_the_oracle(run: str, dual: bool) -> None:
    error, _ = RUNS[run](backend="triton", dual=dual)
    assert error < 2e-5


def test_pages_of_one_and_the_other_layout() -> None:
    for page_size, layout in ((1, "NHD"), (16, "HND")):
        error, _ = RUNS["chunks"](backend="triton", page_size=page_size, layout=layout)
        assert error < 2e-5


def test_virtual_ids() -> None:
    for dual in (True, False):
        error, _ = RUNS["chunks"](backend="triton", dual=dual, virtual=True)
        assert error < 2e-5
