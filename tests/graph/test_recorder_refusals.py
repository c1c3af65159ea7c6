"""What the CPU recorder refuses: host syncs, shapes from device values, captures and replays out of place."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from recorder_world import Served

from anyattn.core.graph.recorder import RecorderFence, RecorderGraph, RecorderPlatform
from anyattn.errors import BatchError, GraphError


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the bodies work on."""

    x: torch.Tensor
    mask: torch.Tensor
    counts: torch.Tensor

    @staticmethod
    def on(device: str) -> Inputs:
        x = torch.arange(6.0, device=device)
        return Inputs(x, x > 2, torch.tensor([1, 2], device=device))


HERE = Inputs.on("cpu")
Work = Callable[[Inputs], object]
REFUSED: dict[str, tuple[Work, str]] = {
    "item": (lambda w: w.x[0].item(), "item"),
    "tolist": (lambda w: w.x.tolist(), "tolist"),
    "cpu": (lambda w: w.x.cpu(), "cpu"),
    "to cpu": (lambda w: w.x.to("cpu"), "to"),
    "to device=cpu": (lambda w: w.x.to(device="cpu", dtype=torch.float64), "to"),
    "numpy": (lambda w: w.x.numpy(), "numpy"),
    "np.asarray": (lambda w: np.asarray(w.x), "__array__"),
    "bool": (lambda w: bool(w.x[0]), "__bool__"),
    "if": (lambda w: 1 if w.x[0] else 2, "__bool__"),
    "and": (lambda w: w.x[0] and 1, "__bool__"),
    "int": (lambda w: int(w.x[0]), "__int__"),
    "float": (lambda w: float(w.x[0]), "__float__"),
    "range": (lambda w: range(w.counts[0]), "__index__"),
    "slice bound": (lambda w: w.x[: w.counts[0]], "_local_scalar_dense"),
    "in": (lambda w: 1.0 in w.x, "__contains__"),
    "print": (lambda w: f"{w.x}", "__format__"),
    "repr": (lambda w: repr(w.x), "__repr__"),
    "is_nonzero": (lambda w: torch.is_nonzero(w.x[0]), "is_nonzero"),
    "equal": (lambda w: torch.equal(w.x, w.x.clone()), "equal"),
    "allclose": (lambda w: torch.allclose(w.x, w.x), "allclose"),
    "nonzero": (lambda w: w.x.nonzero(), "nonzero"),
    "where": (lambda w: torch.where(w.mask), "nonzero"),
    "masked_select": (lambda w: w.x.masked_select(w.mask), "masked_select"),
    "boolean index": (lambda w: w.x[w.mask], "index.Tensor"),
    "byte index": (lambda w: w.x[w.mask.byte()], "index.Tensor"),
    "boolean store": (lambda w: w.x.index_put_((w.mask,), w.x[:3]), "index_put_"),
    "boolean store of one element": (
        lambda w: w.x.index_put_((w.mask,), w.x[:1]),
        "index_put_",
    ),
    "unique": (lambda w: w.x.unique(), "unique"),
    "bincount": (lambda w: w.counts.bincount(), "bincount"),
    "repeat_interleave": (lambda w: w.counts.repeat_interleave(w.counts), "repeat_interleave"),
    "tensor_split": (lambda w: torch.tensor_split(w.x, w.counts), "tensor_split"),
    "tensor": (lambda w: torch.tensor([1.0, 2.0], device=w.x.device), "tensor"),
    "as_tensor": (lambda w: torch.as_tensor([1.0, 2.0], device=w.x.device), "as_tensor"),
    "new_tensor": (lambda w: w.x.new_tensor([1.0]), "new_tensor"),
    "element = number": (lambda w: w.x.__setitem__(0, 0.0), "copy_"),
    "generator": (lambda w: torch.rand(2, generator=torch.Generator()), "rand"),
    "sparse": (lambda w: w.x.to_sparse(), "sparse"),
}


def body_of(work: Work) -> Callable[[], None]:
    def body() -> None:
        work(HERE)

    return body


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_operation_and_line(name: str) -> None:
    work, operation = REFUSED[name]
    graph = RecorderPlatform().new_graph()
    with pytest.raises(GraphError) as caught:
        graph.capture(body_of(work))
    text = str(caught.value)
    line = inspect.getsourcelines(work)[1]
    assert operation in text
    assert f"test_recorder_refusals.py:{line} in <lambda>" in text
    assert caught.value.hint
    with pytest.raises(GraphError, match="before a capture"):
        graph.replay()


ALLOWED: dict[str, Work] = {
    "index": lambda w: w.x[w.counts],
    "masked store of a number": lambda w: w.x.clone().masked_fill_(w.mask, 0.0),
    "boolean store of a number": lambda w: w.x.clone().__setitem__(w.mask, 0.0),
    "slice store of a number": lambda w: w.x.clone().__setitem__(slice(1, 3), 0.0),
    "where": lambda w: torch.where(w.mask, w.x, 0.0),
    "repeat with a size": lambda w: w.counts.repeat_interleave(w.counts, output_size=3),
    "repeat of a constant": lambda w: w.counts.repeat_interleave(2),
    "its own device": lambda w: w.x.to(w.x.device, torch.float64),
    "shapes": lambda w: w.x.new_zeros(w.x.shape[0], w.x.numel(), w.x.dim()),
    "len": lambda w: len(w.x),
    "iteration": lambda w: [x + 1 for x in w.x],
    "data_ptr": lambda w: w.x.data_ptr(),
    "as_tensor of a tensor": lambda w: torch.as_tensor(w.x),
    "sort": lambda w: w.x.sort(),
    "softmax": lambda w: w.x.softmax(0),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    graph = RecorderPlatform().new_graph()
    graph.capture(body_of(ALLOWED[name]))
    graph.replay()


ONLY_IN_A_CAPTURE = {"generator": "no sync, but its state isn't registered with the graph"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", sorted(set(REFUSED) - set(ONLY_IN_A_CAPTURE)))
def test_a_device_refuses_the_same(name: str) -> None:
    """What the recorder refuses, CUDA's sync debug mode (or the operation itself) refuses too."""
    inputs = Inputs.on("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises((RuntimeError, TypeError)):
            REFUSED[name][0](inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ALLOWED)
def test_a_device_allows_the_same(name: str) -> None:
    """And what the recorder allows waits for nothing there."""
    inputs = Inputs.on("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ALLOWED[name](inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_swallowed_refusal_is_still_one() -> None:
    def body() -> None:
        with contextlib.suppress(GraphError):
            HERE.x[0].item()

    graph = RecorderPlatform().new_graph()
    with pytest.raises(GraphError, match="item can't be captured"):
        graph.capture(body)


def captured() -> tuple[RecorderPlatform, RecorderGraph, torch.Tensor]:
    platform, out = RecorderPlatform(), torch.zeros(2)
    graph = platform.new_graph()
    graph.capture(lambda: body_of(lambda w: out.add_(1))())
    return platform, graph, out


def test_capture_inside_a_capture_leaves_both_usable() -> None:
    platform, graph, out = captured()
    inner, outer = platform.new_graph(), platform.new_graph()

    def body() -> None:
        out.mul_(2)
        with pytest.raises(GraphError, match=r"inside another capture.*test_recorder_refusals"):
            inner.capture(lambda: None)
        with pytest.raises(GraphError, match="replay inside a capture"):
            graph.replay()

    outer.capture(body)
    inner.capture(body_of(lambda w: out.sub_(1)))
    out.fill_(1.0)
    for each in (graph, outer, inner):
        each.replay()
    assert out.tolist() == [3.0, 3.0]


def test_one_capture_for_each_graph() -> None:
    _, graph, out = captured()
    with pytest.raises(GraphError, match="captured already"):
        graph.capture(lambda: None)
    out.zero_()
    graph.replay()
    assert out.tolist() == [1.0, 1.0], "the refused capture changed nothing"


def test_a_failed_capture_leaves_other_graphs_and_itself_usable() -> None:
    platform, graph, out = captured()
    failing = platform.new_graph()
    with pytest.raises(GraphError):
        failing.capture(body_of(lambda w: HERE.x.tolist()))
    with pytest.raises(ZeroDivisionError):
        failing.capture(body_of(lambda w: 1 / 0))
    failing.capture(body_of(lambda w: out.mul_(3)))
    out.fill_(1.0)
    graph.replay()
    failing.replay()
    assert out.tolist() == [6.0, 6.0]
    assert HERE.x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "no mode is left behind"


def test_a_result_that_changes_its_shape_is_found() -> None:
    """An operation whose shape depends on values without saying so: caught at replay."""
    rows = torch.tensor([2])

    library = torch.library.Library("anyattn_test", "FRAGMENT")
    library.define("prefix(Tensor x, Tensor n) -> Tensor")
    library.impl("prefix", lambda x, n: x[: int(n)].clone(), "CPU")
    out = torch.zeros(6)
    graph = RecorderPlatform().new_graph()
    graph.capture(body_of(lambda w: out[:1].copy_(torch.ops.anyattn_test.prefix(HERE.x, rows)[:1])))
    rows.fill_(3)
    with pytest.raises(GraphError, match="another shape"):
        graph.replay()


def test_fences_and_waiting() -> None:
    platform = RecorderPlatform()
    fence = platform.new_fence()
    assert isinstance(fence, RecorderFence)
    for call in (fence.wait, fence.record, fence.wait, fence.synchronize, platform.synchronize):
        assert call() is None
    assert platform.memory_bytes() == 0


def test_full_checks_wait_until_the_capture_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ANYATTN_CHECKS=full` reads device values, so planning leaves them out inside a graph."""
    monkeypatch.setenv("ANYATTN_CHECKS", "full")
    served = Served()
    assert served.backend.compiler.checks == "full"
    plan = served.backend.init_forward_metadata_out_graph(served.batch((2, 3, 4)))
    RecorderPlatform().new_graph().capture(lambda: served.backend.init_forward_metadata_in_graph(plan))
    served.table.req_to_token.fill_(0)
    with pytest.raises(BatchError, match="no real slot"):
        served.backend.compiler.check(plan)
