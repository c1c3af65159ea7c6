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


@pytest.mark.parametrize("k", [0.5, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
@pytest.mark.parametrize("v", [4.0, [0.25, 8.0, 2.0]])
def test_a_pair_lies_side_by_side(k: float | list[float], v: float | list[float]) -> None:
    heads = next((len(x) for x in (k, v) if isinstance(x, list)), 1)
    if isinstance(k, list) and isinstance(v, list) and len(k) != len(v):
        with pytest.raises(PoolError, match="per KV head"):
            KVScale.pair(k, v, heads, "cpu")
        return
    first, last = KVScale.pair(k, v, heads, "cpu")
    for given, scale in ((k, first), (v, last)):
        plain = KVScale.of(given, heads, "cpu")
        assert scale.device.tolist() == plain.device.tolist()
        assert (scale.host, scale.granularity) == (plain.host, plain.granularity)
        assert scale.device.data_ptr() % 16 == 0
    apart = last.device.data_ptr() - first.device.data_ptr()
    assert apart == -(-len(first.host) // 4) * 16
