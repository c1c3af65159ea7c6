"""Decode steps of the engine in graphs: the model from token ids to logits, captured once a bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.context import current_context
from anyattn.core.contract import AttentionBackend
from anyattn.core.graph.objects import GraphPlatform
from anyattn.core.graph.runner import GraphRunner
from anyattn.core.spec import Limits
from anyattn.core.traits import GraphSupport, HostLengthNeed
from anyattn.core.wrappers.hybrid import HybridBackend
from anyattn.demo.decoder import Decoder
from anyattn.errors import GraphError, UnknownNameError
from anyattn.platforms.graphs import graph_platform

__all__ = ["CHOICES", "DecodeGraphs", "GraphUse", "use_graphs"]

CHOICES = ("auto", "on", "off")
"""`auto`: on CUDA devices where the backend can be captured. `on`: anywhere, or a `GraphError`."""


class DecodeGraphs:
    """The model's decode step in one graph a bucket; sampling stays outside.

    Attributes:
        runner: captures and replays; its buckets and memory.
    """

    def __init__(
        self,
        model: Decoder,
        backend: AttentionBackend | HybridBackend,
        platform: GraphPlatform,
        limits: Limits,
    ) -> None:
        """Captures every bucket. Raises `GraphError` where the backend or the platform can't."""
        most, device = limits.max_requests, model.device
        self._model = model
        self._rows = torch.arange(most, device=device)
        inputs = {"token_ids": torch.zeros(most, dtype=torch.int64, device=device)}
        self.runner = GraphRunner(backend, self.body, platform, limits=limits, inputs=inputs)
        self.runner.capture()

    def logits(self, batch: ForwardBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """float32 `[B, vocab]` of a decode step, int64 `token_ids [B]`, anywhere; valid until the next call.

        Raises:
            As `GraphRunner.replay`.
        """
        logits = self.runner.replay(batch, token_ids=token_ids)
        assert isinstance(logits, torch.Tensor)
        return logits

    def body(self, batch: ForwardBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """Every row of a decode step is sampled from."""
        positions = current_context().plan.positions
        return self._model.forward(token_ids, positions, batch, self._rows[: batch.num_tokens])

    def __str__(self) -> str:
        runner = self.runner
        buckets = ", ".join(map(str, runner.buckets.sizes))
        nbytes = sum(size for _, size in runner.memory())
        return f"graphs of {buckets} requests ({runner.platform.name}, {nbytes / 1e6:.1f} MB)"


@dataclass(frozen=True)
class GraphUse:
    """What an engine does: `graphs`, or None and `why` in a line."""

    graphs: DecodeGraphs | None
    why: str


def use_graphs(
    choice: str,
    model: Decoder,
    backend: AttentionBackend | HybridBackend,
    limits: Limits,
    platform: GraphPlatform | None = None,
) -> GraphUse:
    """Capture as `choice` says. `platform`: in place of the device's own.

    Raises:
        UnknownNameError: another choice than `CHOICES`.
        GraphError: `on`, and the backend or the device can't.
    """
    if choice not in CHOICES:
        raise UnknownNameError("use of graphs", choice, CHOICES)
    if choice == "off":
        return GraphUse(None, "decode steps run eagerly: graphs are off")
    if choice == "auto" and platform is None and model.device.type != "cuda":
        return GraphUse(None, f"decode steps run eagerly: a {model.device.type} has no graphs that save time")
    reason = _limit(backend)
    if reason is not None and choice == "auto":
        return GraphUse(None, f"decode steps run eagerly: {reason}")
    try:
        graphs = DecodeGraphs(model, backend, platform or graph_platform(model.device), limits)
    except GraphError as error:
        if choice == "on":
            raise
        return GraphUse(None, f"decode steps run eagerly: {_serving(backend)}: {error.message}")
    return GraphUse(graphs, f"decode steps replay {graphs}")


def _serving(backend: AttentionBackend | HybridBackend) -> str:
    child = backend.child(ForwardMode.DECODE) if isinstance(backend, HybridBackend) else backend
    return child.config.name


def _limit(backend: AttentionBackend | HybridBackend) -> str | None:
    """Which backend can't be captured in a decode step, and why; None if it can."""
    traits = backend.traits(ForwardMode.DECODE)
    if traits.graph is not GraphSupport.NEVER:
        return None
    exact = traits.host_lengths is HostLengthNeed.EXACT
    why = ": it computes from exact lengths on the host" if exact else ""
    return f"{_serving(backend)} limits them, its decode row declares no graphs{why}"
