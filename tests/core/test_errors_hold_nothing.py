"""A caught error is gone at once, with the frames that it came through: backends and tensors stand in those.

An error that a local of such a frame keeps is a cycle, and Python looks for cycles by the number of objects.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

import anyattn
from anyattn.core.graph.recorder import RecorderPlatform
from anyattn.detect import sources
from anyattn.errors import GraphError, SelectionError
from anyattn.testing.emulators import torch_npu_graphs
from anyattn.testing.graph_decide import decide_for
from anyattn.testing.graph_setup import GraphSetup


class Held:
    """What stands in a caller's frame."""


@pytest.fixture(autouse=True)
def _nobody_collects() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left(call: Callable[[], object], error: type[Exception]) -> bool:
    """Whether a caller's object outlives the error that `call` raises."""
    seen: list[weakref.ref[Held]] = []

    def caller() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        call()

    raised = False
    try:
        caller()
    except error:
        raised = True
    assert raised
    return seen[0]() is not None


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "NVML_NAMES", ("libnone-of-all.so.1", "/nowhere/libnone.so", "libthird.so"))
    with pytest.raises(OSError, match="libnone-of-all"):
        sources.load_nvml()
    assert not left(sources.load_nvml, OSError)


def test_no_way_to_serve_a_graph() -> None:
    limits = anyattn.Limits(max_requests=2, max_tokens=2, max_context=32)

    def decide() -> None:
        decide_for(GraphSetup(), "fa3", "cpu", None, limits)

    with pytest.raises(SelectionError, match="prefill"):
        decide()
    assert not left(decide, SelectionError)


@pytest.mark.parametrize("swallowed", [False, True])
def test_what_no_graph_can_hold(swallowed: bool) -> None:
    vector = torch.arange(3.0)

    def body() -> None:
        with suppress(GraphError if swallowed else ZeroDivisionError):
            vector.tolist()

    def on_a_stand_in() -> None:
        with torch_npu_graphs.graph(torch_npu_graphs.NPUGraph()):
            body()

    for capture in (lambda: RecorderPlatform().new_graph().capture(body), on_a_stand_in):
        with pytest.raises(GraphError, match="tolist can't be captured"):
            capture()
        assert not left(capture, GraphError)


def test_an_error_that_is_kept_is_seen() -> None:
    def keeps() -> None:
        kept = SelectionError("refused", asked="a", allowed="b", hint="c")
        raise kept

    assert left(keeps, SelectionError)
