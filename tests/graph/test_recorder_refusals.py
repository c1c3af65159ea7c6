"""What the CPU recorder refuses: host syncs, shapes from device values, captures and replays out of place."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from recorder_world import Served

from anyattn.core.graph.recorder import RecorderFence, RecorderGraph, RecorderPlatform
from anyattn.errors import BatchError, GraphError

X, MASK, COUNTS = torch.arange(6.0), torch.arange(6) > 2, torch.tensor([1, 2])
SQUARE = torch.eye(2)

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "item": (lambda: X[0].item(), "item"),
    "tolist": (lambda: X.tolist(), "tolist"),
    "cpu": (lambda: X.cpu(), "cpu"),
    "to cpu": (lambda: X.to("cpu"), "to"),
    "to device=cpu": (lambda: X.to(device="cpu", dtype=torch.float64), "to"),
    "numpy": (lambda: X.numpy(), "numpy"),
    "np.asarray": (lambda: np.asarray(X), "__array__"),
    "bool": (lambda: bool(X[0]), "__bool__"),
    "if": (lambda: 1 if X[0] else 2, "__bool__"),
    "and": (lambda: X[0] and 1, "__bool__"),
    "int": (lambda: int(X[0]), "__int__"),
    "float": (lambda: float(X[0]), "__float__"),
    "range": (lambda: range(COUNTS[0]), "__index__"),
    "slice bound": (lambda: X[: COUNTS[0]], "_local_scalar_dense"),
    "in": (lambda: 1.0 in X, "__contains__"),
    "print": (lambda: f"{X}", "__format__"),
    "repr": (lambda: repr(X), "__repr__"),
    "is_nonzero": (lambda: torch.is_nonzero(X[0]), "is_nonzero"),
    "equal": (lambda: torch.equal(X, X), "equal"),
    "allclose": (lambda: torch.allclose(X, X), "allclose"),
    "nonzero": (lambda: X.nonzero(), "nonzero"),
    "where": (lambda: torch.where(MASK), "nonzero"),
    "masked_select": (lambda: X.masked_select(MASK), "masked_select"),
    "boolean index": (lambda: X[MASK], "index.Tensor"),
    "byte index": (lambda: X[MASK.byte()], "index.Tensor"),
    "boolean store": (lambda: X.index_put_((MASK,), torch.ones(3)), "index_put_"),
    "unique": (lambda: X.unique(), "unique"),
    "bincount": (lambda: COUNTS.bincount(), "bincount"),
    "repeat_interleave": (lambda: COUNTS.repeat_interleave(COUNTS), "repeat_interleave"),
    "tensor_split": (lambda: torch.tensor_split(X, COUNTS), "tensor_split"),
    "tensor": (lambda: torch.tensor([1.0, 2.0]), "tensor"),
    "as_tensor": (lambda: torch.as_tensor([1.0, 2.0]), "as_tensor"),
    "new_tensor": (lambda: X.new_tensor([1.0]), "new_tensor"),
    "element = number": (lambda: X.__setitem__(0, 0.0), "copy_"),
    "generator": (lambda: torch.rand(2, generator=torch.Generator()), "rand"),
    "sparse": (lambda: SQUARE.to_sparse(), "sparse"),
}


def body_of(work: Callable[[], object]) -> Callable[[], None]:
    def body() -> None:
        work()

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


ALLOWED: dict[str, Callable[[], object]] = {
    "index": lambda: X[COUNTS],
    "masked store of a number": lambda: X.clone().masked_fill_(MASK, 0.0),
    "where": lambda: torch.where(MASK, X, 0.0),
    "repeat with a size": lambda: COUNTS.repeat_interleave(COUNTS, output_size=3),
    "repeat of a constant": lambda: COUNTS.repeat_interleave(2),
    "its own device": lambda: X.to(X.device, torch.float64),
    "shapes": lambda: X.new_zeros(X.shape[0], X.numel(), X.dim()),
    "len": lambda: len(X),
    "iteration": lambda: [x + 1 for x in X],
    "data_ptr": lambda: X.data_ptr(),
    "as_tensor of a tensor": lambda: torch.as_tensor(X),
    "sort": lambda: X.sort(),
    "softmax": lambda: X.softmax(0),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed(name: str) -> None:
    graph = RecorderPlatform().new_graph()
    graph.capture(body_of(ALLOWED[name]))
    graph.replay()


def test_a_swallowed_refusal_is_still_one() -> None:
    def body() -> None:
        with contextlib.suppress(GraphError):
            X[0].item()

    graph = RecorderPlatform().new_graph()
    with pytest.raises(GraphError, match="item can't be captured"):
        graph.capture(body)


def captured() -> tuple[RecorderPlatform, RecorderGraph, torch.Tensor]:
    platform, out = RecorderPlatform(), torch.zeros(2)
    graph = platform.new_graph()
    graph.capture(lambda: body_of(lambda: out.add_(1))())
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
    inner.capture(body_of(lambda: out.sub_(1)))
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
        failing.capture(body_of(lambda: X.tolist()))
    with pytest.raises(ZeroDivisionError):
        failing.capture(body_of(lambda: 1 / 0))
    failing.capture(body_of(lambda: out.mul_(3)))
    out.fill_(1.0)
    graph.replay()
    failing.replay()
    assert out.tolist() == [6.0, 6.0]
    assert X.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "no mode is left behind"


def test_a_result_that_changes_its_shape_is_found() -> None:
    """An operation whose shape depends on values without saying so: caught at replay."""
    rows = torch.tensor([2])

    library = torch.library.Library("anyattn_test", "FRAGMENT")
    library.define("prefix(Tensor x, Tensor n) -> Tensor")
    library.impl("prefix", lambda x, n: x[: int(n)].clone(), "CPU")
    out = torch.zeros(6)
    graph = RecorderPlatform().new_graph()
    graph.capture(body_of(lambda: out[:1].copy_(torch.ops.anyattn_test.prefix(X, rows)[:1])))
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
