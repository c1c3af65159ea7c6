"""`PiecewiseRunner`: segments that `torch.compile` finds, at the op `anyattn::attention`.

The model is traced once into an FX graph, for any number of tokens; the graph is split at the attention ops.
What stands between them is captured for each token bucket, and attention runs eagerly, as in `breakable`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from anyattn.core.graph.breakable import BreakableRunner
from anyattn.core.graph.breakable_calls import Segments
from anyattn.core.plan import Plan
from anyattn.errors import GraphError

__all__ = ["Pieces", "PiecewiseRunner", "piecewise_backend", "split_at_attention"]

_recording: ContextVar[Segments | None] = ContextVar("anyattn_pieces", default=None)


def split_at_attention(graph: fx.GraphModule) -> tuple[fx.GraphModule, frozenset[str]]:
    """The graph as modules called one after another, and the names of those that are one attention op.

    Raises:
        GraphError: a graph without attention ops.
    """
    part, parts, apart = 0, {}, set()
    for node in graph.graph.nodes:
        if _is_attention(node):
            apart.add(part + 1)
            parts[node], part = part + 1, part + 2
        elif node.op not in ("placeholder", "output"):
            parts[node] = part
    if not apart:
        raise GraphError(
            "nothing to split: the traced graph calls no attention layer",
            asked="piecewise graphs",
            allowed="a model with anyattn.AttentionLayer",
            hint="compile the whole model, not a part without attention",
        )
    # An attention op writes into a tensor and returns nothing: only the order says who reads it after that.
    split = split_module(graph, nn.Module(), lambda node: parts[node], keep_original_order=True)
    return split, frozenset(f"submod_{number}" for number in apart)


def _is_attention(node: fx.Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith("anyattn.attention")


class Pieces:
    """A traced model in pieces: called plainly it is the model; while `recorded`, each piece is captured."""

    def __init__(self, graph: fx.GraphModule) -> None:
        """Raises `GraphError` for a graph without attention ops."""
        self.split, self.attention = split_at_attention(graph)

    def __call__(self, *args: Any) -> Any:
        """Outputs of the model for the inputs of its trace."""
        segments = _recording.get()
        if segments is None:
            return self.split(*args)
        return _Recorder(self, segments).run(*args)


class _Recorder(fx.Interpreter):
    """Runs a split module once, each piece but the attention ops inside a graph of its own."""

    def __init__(self, pieces: Pieces, segments: Segments) -> None:
        super().__init__(pieces.split)
        self._attention, self._segments = pieces.attention, segments

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called by the interpreter for every piece, in order."""
        piece = self.fetch_attr(target)
        if target in self._attention:
            return piece(*args, **kwargs)  # the op finds `Segments` in the forward context
        with self._segments.recording():
            return piece(*args, **kwargs)


def piecewise_backend(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """For `torch.compile(model, backend=piecewise_backend, fullgraph=True)`.

    A `PiecewiseRunner` captures what it returns; elsewhere that runs as it was traced, eagerly.
    """
    return Pieces(graph)


@contextmanager
def _recorded(segments: Segments) -> Iterator[None]:
    token = _recording.set(segments)
    try:
        yield
    finally:
        _recording.reset(token)


class PiecewiseRunner(BreakableRunner):
    """A `BreakableRunner` whose body is traced by `torch.compile` instead of watched.

    The whole body must be one graph (`fullgraph=True`). Replays are those of `BreakableRunner`: no compiled
    Python runs, and no guards.

    Attributes:
        compiled: the traced body. Its first axis of tokens is dynamic: one trace serves all buckets but 1.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `BreakableRunner`. Raises `GraphError` for `captured_metadata`: a trace follows no context."""
        if options.get("captured_metadata"):
            raise GraphError(
                "a traced body can't read the plan of the forward context",
                asked="captured_metadata=True",
                allowed="inputs of the runner",
                hint="give positions and the like as inputs, or use BreakableRunner",
            )
        super().__init__(*args, **options)
        self.compiled = torch.compile(self._body, backend=piecewise_backend, fullgraph=True)

    def _run(self, segments: Segments, inputs: dict[str, torch.Tensor], metadata: Plan | None) -> Any:
        for value in inputs.values():
            torch._dynamo.maybe_mark_dynamic(value, 0)  # type: ignore[no-untyped-call]
        return self._run_body(self.compiled, segments, inputs, metadata)

    def _record(self, segments: Segments, inputs: dict[str, torch.Tensor], metadata: Plan | None) -> Any:
        with _recorded(segments):
            return self._run(segments, inputs, metadata)
