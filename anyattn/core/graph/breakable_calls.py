"""A step as graphs with eager attention between them: the calls, their outputs, and what records both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace

import torch

from anyattn.core.batch import ForwardBatch
from anyattn.core.call import LayerInputs, LayerOutput
from anyattn.core.context import Attends
from anyattn.core.graph.breakable_checks import check_call
from anyattn.core.graph.objects import GraphObject, GraphPlatform
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan

__all__ = ["EagerCall", "Segments", "StaticOutputs"]


@dataclass(eq=False)
class EagerCall:
    """One layer between two segments: tensors at the addresses that the segments write and read.

    Attributes:
        q, k, v: of the segment before, with the bucket's rows. out, lse: read by the segments behind.
        save: store k and v.
    """

    layer: AttentionLayer
    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    save: bool
    inputs: LayerInputs | None

    def run(self, backend: Attends, batch: ForwardBatch, plan: Plan) -> None:
        """Attention of the step's own tokens; the rows behind them become 0 (lse: -inf)."""
        rows, padded = batch.num_tokens, self.q.shape[0]
        whole = rows == padded
        q, k, v, out, lse = (
            x if whole or x is None else x[:rows] for x in (self.q, self.k, self.v, self.out, self.lse)
        )
        assert q is not None
        backend.forward(
            q, k, v, self.layer, batch,
            save_kv_cache=self.save, return_lse=lse is not None, out=out, lse_out=lse,
            inputs=self.inputs if whole else _rows(self.inputs, rows), plan=plan,
        )  # fmt: skip
        if not whole:
            self.out[rows:].zero_()
            if self.lse is not None:
                self.lse[rows:].fill_(-torch.inf)


def _rows(inputs: LayerInputs | None, rows: int) -> LayerInputs | None:
    if inputs is None:
        return None
    given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    return replace(inputs, **{name: x[:rows] for name, x in given.items() if x is not None})


class StaticOutputs:
    """Outputs of the eager calls, one for each call of a step; all buckets use the same memory.

    Segments may keep an output for later ones, so no two calls of a step share theirs.
    """

    def __init__(self, most_rows: int) -> None:
        self._most = most_rows
        self._memory: dict[tuple[int, str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def take(
        self, call: int, name: str, rows: int, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """`[rows, *shape]` of call number `call`, on the device of `like`; zero where nobody wrote."""
        key = (call, name, shape, dtype)
        memory = self._memory.get(key)
        if memory is None:
            memory = torch.zeros((self._most, *shape), dtype=dtype, device=like.device)
            self._memory[key] = memory
        return memory[:rows]

    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(x.nbytes for x in self._memory.values())


class Segments:
    """Stands for the backend while a step is captured: a layer's call ends one graph and begins the next.

    Attention isn't computed here: outputs hold whatever an earlier step left.

    Attributes:
        steps: graphs and calls in the order of a replay.
    """

    def __init__(self, platform: GraphPlatform, num_tokens: int, outputs: StaticOutputs) -> None:
        self.num_tokens = num_tokens
        self.steps: list[GraphObject | EagerCall] = []
        self._platform, self._outputs = platform, outputs
        self._calls = 0
        self._open: ExitStack | None = None
        self._last: GraphObject | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Capture what the block does, in as many segments as its calls make of it."""
        with ExitStack() as self._open:
            self._begin(self._open)
            yield
            self._end(self._open)
        self._open = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        *,
        save_kv_cache: bool = True,
        return_lse: bool = False,
        out: torch.Tensor | None = None,
        lse_out: torch.Tensor | None = None,
        inputs: LayerInputs | None = None,
        plan: Plan,
    ) -> LayerOutput:
        """Remembers the call, and returns its static outputs.

        Raises:
            GraphError: a call that can't stand between segments.
        """
        check_call(q, k, layer, self.num_tokens)
        if self._open is not None:
            self._end(self._open)
        if out is None:
            out = self._take(q, "out", _out_shape(q, layer), q.dtype)
        lse = lse_out if return_lse else None
        if return_lse and lse is None:
            lse = self._take(q, "lse", (layer.spec.num_q_heads,), torch.float32)
        self._calls += 1
        self.steps.append(EagerCall(layer, q, k, v, out, lse, save_kv_cache, inputs))
        if self._open is not None:
            self._begin(self._open)
        return LayerOutput(out, lse)

    def _take(self, q: torch.Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._outputs.take(self._calls, name, q.shape[0], shape, q, dtype)

    def _begin(self, stack: ExitStack) -> None:
        graph = self._platform.new_graph()
        stack.enter_context(graph.recording(after=self._last))
        self._last = graph

    def _end(self, stack: ExitStack) -> None:
        stack.close()
        assert self._last is not None
        self.steps.append(self._last)


def _out_shape(q: torch.Tensor, layer: AttentionLayer) -> tuple[int, ...]:
    heads, size = (
        layer.spec.num_q_heads,
        layer.spec.v_head_dim,
    )  # latents: steps between segments are absorbed
    return (heads * size,) if q.dim() == 2 else (heads, size)
