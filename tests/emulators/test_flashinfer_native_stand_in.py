"""The stand-in of FlashInfer's native decode planner: what it refuses, and what a wrong schedule does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anyattn.testing.emulators import emulating

HALF = torch.bfloat16
KERNELS = {"fa2": (True, "fa2", 20), "fa3": (True, "fa3", 16), "cores": (False, "fa2", 15)}


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    with emulating("flashinfer"):
        yield


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _wrapper(kernel: str) -> tuple[Any, list[Any]]:
    """A wrapper planned for 5 and 9 keys on pages of 4, and the arguments of its native planner."""
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    cores, backend, _ = KERNELS[kernel]
    space = torch.zeros(1 << 12, dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        space, "NHD", use_tensor_cores=cores, backend=backend
    )
    seen: list[Any] = []
    lens = _ints(5, 9)
    tables = (_ints(0, 2, 5), _ints(1, 2, 3, 4, 5), _ints(1, 1))
    wrapper.plan(*tables, 2, 2, 64, 4, q_data_type=HALF, kv_data_type=HALF, seq_lens=lens)
    module = wrapper._cached_module
    kept = module.plan
    module.plan = lambda *args: seen.extend(args) or kept(*args)
    try:
        wrapper.plan(*tables, 2, 2, 64, 4, q_data_type=HALF, kv_data_type=HALF, seq_lens=lens)
    finally:
        del module.plan
    return wrapper, seen


def _run(wrapper: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(6, 4, 2, 64, generator=draw).to(HALF) for _ in "kv")
    out: torch.Tensor = wrapper.run(torch.randn(2, 2, 64, generator=draw).to(HALF), (k, v))
    return out


@pytest.mark.parametrize("kernel", KERNELS)
def test_arguments_are_counted_by_kernel(kernel: str) -> None:
    wrapper, args = _wrapper(kernel)
    assert len(args) == KERNELS[kernel][2]
    with pytest.raises(TypeError, match="arguments"):
        wrapper._cached_module.plan(*args, 0)
    wrapper._plan_info = wrapper._cached_module.plan(*args)
    assert torch.isfinite(_run(wrapper)).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_does_not_fit_the_batch_is_refused(kernel: str) -> None:
    wrapper, args = _wrapper(kernel)
    at = 3 if kernel == "cores" else 4
    for wrong in (_ints(0, 2), torch.tensor([0, 2, 5])):
        with pytest.raises(RuntimeError, match="int32"):
            wrapper._cached_module.plan(*args[:at], wrong, *args[at + 1 :])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_schedule_of_other_sizes_or_lengths_shows(kernel: str) -> None:
    wrapper, args = _wrapper(kernel)
    at = 3 if kernel == "cores" else 4
    fine = _run(wrapper)
    assert torch.isfinite(fine).all()
    wrapper._plan_info = wrapper._cached_module.plan(*args[:at], _ints(0, 1, 5), *args[at + 1 :])
    assert torch.isnan(_run(wrapper)).any(), "other pages than the kernel's table has"
    heads = args.index(2, at + 2 if kernel == "cores" else at + 4)
    wrapper._plan_info = wrapper._cached_module.plan(*args[:heads], 4, *args[heads + 1 :])
    assert torch.isnan(_run(wrapper)).all(), "planned for other heads"
    wrapper._plan_info = wrapper._cached_module.plan(*args)
    assert torch.equal(_run(wrapper), fine)
