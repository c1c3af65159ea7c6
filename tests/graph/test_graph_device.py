"""The pretended device: what counts as a wait for it, and as an allocation on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.testing.graph_device import pretending_device
from anyattn.testing.graph_emulated import opaque


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda d, h: d.tolist(), "tolist"),
        (lambda d, h: d.max().item(), "item"),
        (lambda d, h: bool((d[:2] > 0).all()), "__bool__"),
        (lambda d, h: h.copy_(d), "copy_"),
        (lambda d, h: d[d > 1], "index"),
        (lambda d, h: (d * h).cpu(), "cpu"),
    ],
)
def test_reads_of_the_device_are_found(
    read: Callable[[torch.Tensor, torch.Tensor], object], named: str
) -> None:
    device, host = torch.arange(4), torch.arange(4)
    with pretending_device([device]) as use:
        read(device, host)
    assert len(use.syncs) >= 1
    assert named in use.syncs[0]
    assert "test_graph_device.py" in use.syncs[0]


def test_host_tensors_may_be_read_and_made() -> None:
    device, host = torch.zeros(4, dtype=torch.int64), torch.arange(4)
    with pretending_device([device]) as use:
        assert host.tolist() == [0, 1, 2, 3]
        device.copy_(host + 1)
        device[1:].fill_(7)
    assert (use.syncs, use.allocations) == ([], [])
    assert device.tolist() == [1, 7, 7, 7]


def test_allocations_on_the_device_are_found() -> None:
    device = torch.zeros(4)
    with pretending_device([device]) as use:
        _ = device + 1
        torch.empty(3, device=torch.device("cpu"))
        torch.zeros(3)
    assert len(use.allocations) == 2
    assert "aten.add" in use.allocations[0]
    assert use.allocations[1].startswith("empty at")


def test_stand_ins_are_one_step_that_reads_memory_anew() -> None:
    """A call that reads lengths on the host is recorded whole, and made again at a replay."""

    @opaque
    def total(lens: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.stack([values[: int(n)].sum() for n in lens.tolist()])

    lens, values = torch.tensor([1, 2]), torch.arange(4.0)
    graph, out = RecorderPlatform().new_graph(), torch.zeros(2)

    def body() -> None:
        out.copy_(total(lens, values))

    graph.capture(body)
    assert any("total" in name for name in graph.operations)
    lens.copy_(torch.tensor([4, 3]))
    graph.replay()
    assert out.tolist() == [6.0, 3.0]


def test_stand_ins_that_write_into_what_they_are_given() -> None:
    @opaque
    def double(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(x * len(x.tolist()))

    x, out = torch.ones(2), torch.zeros(2)
    graph = RecorderPlatform(poison=True).new_graph()

    def body() -> None:
        double(x, out).add_(1)

    graph.capture(body)
    x.fill_(5)
    graph.replay()
    assert out.tolist() == [11.0, 11.0]
