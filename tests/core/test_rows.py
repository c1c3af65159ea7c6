"""`contiguous()` is not aligned: rows that kernels load widest begin where they must, nothing else moves."""

from __future__ import annotations

import pytest
import torch

from anyattn.core.rows import aligned, dense


def _at(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    memory = torch.randn(4096)
    begin = offset + (-memory.data_ptr() // 4) % 4
    return memory.as_strided(shape, strides, begin)


@pytest.mark.parametrize("copy", [aligned, dense])
def test_one_row_at_an_odd_address_counts_as_contiguous_and_is_copied(copy: object) -> None:
    row = _at(3, (1, 4, 8), (33, 8, 1))
    assert row.is_contiguous()
    made = copy(row)  # type: ignore[operator]
    assert made.data_ptr() % 16 == 0
    assert torch.equal(made, row)
    assert made.data_ptr() != row.data_ptr()


@pytest.mark.parametrize("strides", [(33, 8, 1), (32, 9, 1), (32, 8, 2)])
def test_rows_at_odd_steps_are_copied(strides: tuple[int, ...]) -> None:
    x = _at(0, (5, 4, 4), strides)
    made = aligned(x)
    assert made is not x
    assert torch.equal(made, x)


def test_what_is_aligned_stays() -> None:
    gaps = _at(4, (5, 4, 8), (64, 8, 1))
    assert aligned(gaps) is gaps
    assert dense(gaps) is not gaps
    whole = _at(8, (5, 4, 8), (32, 8, 1))
    assert aligned(whole) is whole
    assert dense(whole) is whole
