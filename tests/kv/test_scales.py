"""KV scales come as numbers, lists, tensors or a checkpoint's parameters, and end up the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anyattn.core.kv.scales import KVScale
from anyattn.errors import PoolError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "given",
    [
        0.5,
        torch.tensor(0.5),
        torch.tensor([0.5]),
        nn.Parameter(torch.tensor(0.5), requires_grad=False),
        nn.Parameter(torch.tensor([0.5], dtype=torch.bfloat16)),
    ],
)
def test_one_number_in_any_form(given: float | torch.Tensor) -> None:
    scale = KVScale.of(given, 2, CPU)
    assert (scale.host, scale.granularity) == ((0.5,), "tensor")
    assert type(scale.host[0]) is float
    assert type(scale.device) is torch.Tensor
    assert not scale.device.requires_grad


@pytest.mark.parametrize("given", [[0.5, 2.0], torch.tensor([0.5, 2.0]), torch.tensor([[0.5], [2.0]])])
def test_one_number_a_head(given: list[float] | torch.Tensor) -> None:
    scale = KVScale.of(given, 2, CPU)
    assert (scale.host, scale.granularity) == ((0.5, 2.0), "head")


@pytest.mark.parametrize(
    "given", [torch.tensor(0.0), torch.tensor(float("nan")), torch.tensor([1.0, 2.0, 3.0])]
)
def test_tensors_that_are_no_scales(given: torch.Tensor) -> None:
    with pytest.raises(PoolError, match="scale"):
        KVScale.of(given, 2, CPU)
