"""What is spared makes no difference: nothing stays replaced, types are right, overflow is found."""

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from anyattn.testing import interpreter_costs
from anyattn.testing.interpreter_costs import spare_interpreter

SPARED = ("_patch_builtin", "_get_np_dtype")
NAMESPACES = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)


@triton.jit
def _twice(x):  # noqa: ANN001, ANN202
    return x + x


@triton.jit
def twice_kernel(x, out, N: tl.constexpr):  # noqa: ANN001, ANN201
    i = tl.arange(0, N)
    tl.store(out + i, _twice(tl.load(x + i)))


def twice(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    twice_kernel[(1,)](x, out, x.numel())
    return out


def builtins() -> dict[str, Any]:
    return {
        f"{space.__name__}.{name}": member
        for space in NAMESPACES
        for name, member in inspect.getmembers(space)
        if tl.core.is_builtin(member)
    }


def test_this_triton_is_spared_once() -> None:
    """A version with other functions would run, only slower: this test says so."""
    spared = [getattr(interpreter, name) for name in SPARED]
    assert {function.__module__ for function in spared} == {interpreter_costs.__name__}
    spare_interpreter()
    assert [getattr(interpreter, name) for name in SPARED] == spared


def test_builtins_are_replaced_in_a_launch_and_back_behind_it() -> None:
    before = builtins()
    assert len(before) > 100
    seen = []
    handed_on = interpreter.interpreter_builder.set_grid_idx
    interpreter.interpreter_builder.set_grid_idx = lambda *at: (seen.append(builtins()), handed_on(*at))
    try:
        assert twice(torch.arange(8)).tolist() == list(range(0, 16, 2))
    finally:
        interpreter.interpreter_builder.set_grid_idx = handed_on
    (within,) = seen
    assert not [name for name in within if not name.startswith("triton.language.core.")]
    assert builtins() == before


def test_types_are_numpys() -> None:
    sizes = {
        tl.int1: bool,
        tl.int32: np.int32,
        tl.uint8: np.uint8,
        tl.bfloat16: np.uint16,
        tl.float8e5: np.uint8,
    }
    for _ in range(2):
        for kind, wanted in sizes.items():
            assert interpreter._get_np_dtype(kind) == wanted
            assert interpreter._get_np_dtype(tl.block_type(kind, [4])) == wanted
            pointer = tl.pointer_type(kind)
            assert interpreter._get_np_dtype(pointer) == np.uint64
            assert interpreter._get_np_dtype(tl.block_type(pointer, [4])) == np.uint64


def test_overflow_is_found_where_it_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.full((4,), 2**30, dtype=torch.int32)
    assert twice(large).tolist() == [-(2**31)] * 4  # without `debug` nothing asserts, whoever computes it
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation add"):
        twice(large)
    assert twice(large - 1).tolist() == [2**31 - 2] * 4


@triton.jit
def masked_by_a_number_kernel(x, at, out, N: tl.constexpr):  # noqa: ANN001, ANN201
    i = tl.arange(0, N)
    live = (i < 3) & (tl.load(at) >= 0)
    tl.store(out + i, tl.load(x + i, mask=live, other=9), mask=i < N)


@pytest.mark.parametrize(("at", "want"), [(5, [1, 2, 3, 9]), (-5, [9, 9, 9, 9])])
def test_a_comparison_of_numbers_masks_a_block(at: int, want: list[int]) -> None:
    """Triton 3.9's interpreter alone refuses it: `mask has unsupported dtype`."""
    x, out = torch.tensor([1, 2, 3, 4]), torch.zeros(4, dtype=torch.int64)
    masked_by_a_number_kernel[(1,)](x, torch.tensor([at]), out, 4)
    assert out.tolist() == want
