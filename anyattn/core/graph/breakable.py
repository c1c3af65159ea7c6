"""`BreakableRunner`: prefill as captured segments with eager attention between them.

All that a model does between two attention layers is one graph for each token bucket. Attention runs on the
step's own eager plan and its real rows, so one set of graphs serves every mode, any number of requests and
any lengths. Model code is unchanged: a layer called during the capture ends a segment by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.context import forward_context
from anyattn.core.graph.breakable_calls import EagerCall, Segments, StaticOutputs
from anyattn.core.graph.breakable_checks import (
    CapturedBatch,
    CapturedPlan,
    check_backend,
    check_inputs,
    check_step,
)
from anyattn.core.graph.breakable_metadata import segment_batch
from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform
from anyattn.core.graph.runner import Body
from anyattn.core.graph.static import PoolGuard, copy_in, cut
from anyattn.core.graph.token_buckets import TokenBuckets
from anyattn.core.plan import Plan
from anyattn.core.spec import Limits
from anyattn.core.traits import SharedReadEnds, Traits
from anyattn.errors import GraphError

__all__ = ["BreakableRunner", "CapturedSegments"]


@dataclass(eq=False)
class CapturedSegments:
    """The steps of one token bucket, and everything that they read: graphs keep nothing alive.

    Attributes:
        steps: graphs and eager calls in order. metadata: the plan that segments read, or None.
        nbytes: what the capture added on the device, without the outputs that all buckets share.
    """

    num_tokens: int
    steps: list[GraphObject | EagerCall]
    inputs: Mapping[str, torch.Tensor]
    outputs: Any
    metadata: Plan | None
    nbytes: int

    @property
    def num_graphs(self) -> int:
        """Segments: attention layers + 1."""
        return sum(isinstance(step, GraphObject) for step in self.steps)


class BreakableRunner:
    """Captures a body in segments, and replays them with eager attention in between."""

    def __init__(
        self,
        backend: Any,
        body: Body,
        platform: GraphPlatform,
        *,
        limits: Limits,
        inputs: Mapping[str, torch.Tensor] | None = None,
        token_buckets: TokenBuckets | None = None,
        captured_metadata: bool = False,
    ) -> None:
        """Nothing is captured yet.

        Args:
            body: `body(batch, **inputs) -> outputs`; of `batch` it may read `num_tokens` (the bucket's rows).
            inputs: static buffers by name, `[max_tokens, …]`; a replay copies the step's values in.
            captured_metadata: the body may read `current_context().plan` (positions, lengths, write slots)
                inside segments; costs one more upload a step.

        Raises:
            GraphError: a backend that declares no eager attention between graphs, an input that is shorter
                than the largest bucket.
        """
        self.backend, self.platform, self.limits = backend, platform, limits
        self.buckets = token_buckets or TokenBuckets.up_to(limits.max_tokens)
        self.inputs = dict(inputs or {})
        self.read_done: Fence = platform.new_fence()
        """Behind it, nothing of the last replay reads what a scheduler owns: tables, batch, inputs."""
        self._body, self._with_metadata = body, captured_metadata
        self._captured: dict[int, CapturedSegments] = {}
        self._traits: dict[ForwardMode, Traits] = {}
        extend = ForwardMode.EXTEND
        self._mla_method = check_backend(backend, self._traits_of(extend), extend)
        self._outputs, self._pool = StaticOutputs(self.buckets.largest), PoolGuard(backend)
        for name, value in self.inputs.items():
            if value.shape[0] < self.buckets.largest:
                raise GraphError(
                    f"static input {name!r} is shorter than the largest bucket",
                    asked=value.shape[0],
                    allowed=f">= {self.buckets.largest}",
                    hint="inputs are [max_tokens, …]; or give smaller token_buckets",
                )

    # -- capture -------------------------------------------------------------------------------------

    @torch.no_grad()
    def capture(self) -> None:
        """Capture every bucket, the largest first: smaller ones then live in its memory.

        Raises:
            GraphError: a body that no graph can hold (it says which line), a capture inside another one.
        """
        self._pool.check_idle("capture")
        for size in reversed(self.buckets.sizes):
            self._captured[size] = self._capture(size)

    def _capture(self, size: int) -> CapturedSegments:
        inputs = {name: value[:size] for name, value in self.inputs.items()}
        before = self.platform.memory_bytes()
        metadata = self._new_metadata(size)
        self._warm_up(Segments(self.platform, size, self._outputs), inputs, metadata)
        self.platform.synchronize()
        segments = Segments(self.platform, size, self._outputs)
        outputs = self._record(segments, inputs, metadata)
        nbytes = self.platform.memory_bytes() - before
        return CapturedSegments(size, segments.steps, inputs, outputs, metadata, nbytes)

    def _warm_up(self, segments: Segments, inputs: dict[str, torch.Tensor], metadata: Plan | None) -> None:
        """Compiles kernels and lets libraries allocate what they keep, outside the capture."""
        self._run(segments, inputs, metadata)

    def _record(self, segments: Segments, inputs: dict[str, torch.Tensor], metadata: Plan | None) -> Any:
        with segments.recording():
            return self._run(segments, inputs, metadata)

    def _run(self, segments: Segments, inputs: dict[str, torch.Tensor], metadata: Plan | None) -> Any:
        return self._run_body(self._body, segments, inputs, metadata)

    def _run_body(
        self, body: Body, segments: Segments, inputs: dict[str, torch.Tensor], metadata: Plan | None
    ) -> Any:
        batch: Any = CapturedBatch(segments.num_tokens)
        plan: Any = metadata or CapturedPlan(batch, self._mla_method)
        with forward_context(segments, plan):
            return body(batch, **inputs)

    def _new_metadata(self, size: int) -> Plan | None:
        if not self._with_metadata:
            return None
        example = segment_batch(None, self.limits.max_requests, size, self.backend.table)
        plan: Plan = self.backend.init_forward_metadata_for_breakable_cuda_graph_capture(example)
        return plan

    # -- replay --------------------------------------------------------------------------------------

    @torch.no_grad()
    def replay(self, batch: ForwardBatch, **inputs: torch.Tensor) -> Any:
        """The body's outputs for `batch`, cut to its own tokens; valid until the next replay.

        `inputs`: `[T, …]` for each static buffer that this step changes.

        Raises:
            GraphError: nothing captured, more tokens than the largest bucket, an unknown input, a pool that
                was replaced, a capture going on. Nothing was changed then.
            BatchError, HostLengthError, FeatureError: as in eager preparation.
        """
        self._pool.check_idle("replay")
        entry = self.entry(batch)
        check_inputs(self.inputs, inputs, batch.num_tokens)
        plan = self._prepare(entry, batch, inputs)
        for step in entry.steps:
            if isinstance(step, EagerCall):
                step.run(self.backend, batch, plan)
            else:
                step.replay()
        if self._traits_of(batch.forward_mode).shared_read_ends > SharedReadEnds.IN_REPLAY:
            self.read_done.record()
        return cut(entry.outputs, batch.num_tokens, entry.num_tokens)

    def entry(self, batch: ForwardBatch) -> CapturedSegments:
        """The segments that `batch` runs in. Raises `GraphError` as `replay`."""
        self._pool.check_pool()
        check_step(batch)
        self._traits_of(batch.forward_mode)
        size = self.buckets.fit(batch.num_tokens)
        if size not in self._captured:
            raise GraphError(
                "these segments were never captured",
                asked=f"{size} tokens",
                allowed=", ".join(map(str, self._captured)) or "nothing yet",
                hint="runner.capture()",
            )
        return self._captured[size]

    def _prepare(
        self, entry: CapturedSegments, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]
    ) -> Plan:
        """The step's eager plan, then everything that segments read at fixed addresses."""
        plan: Plan = self.backend.init_forward_metadata(batch)
        if plan.mla_method is not self._mla_method:
            raise GraphError(
                "this step runs latent layers by another method than the segments",
                asked=plan.mla_method,
                allowed=self._mla_method,
                hint="run it eagerly",
            )
        if entry.metadata is not None:
            padded = segment_batch(batch, self.limits.max_requests, entry.num_tokens, self.backend.table)
            self.backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(entry.metadata, padded)
        for name, value in inputs.items():
            copy_in(entry.inputs[name], value)
        if self._traits_of(batch.forward_mode).shared_read_ends <= SharedReadEnds.IN_REPLAY:
            self.read_done.record()
        return plan

    def can_replay(self, batch: ForwardBatch) -> str | None:
        """None if `replay` would take the batch, else the reason."""
        try:
            self.entry(batch)
        except GraphError as error:
            return str(error)
        return None

    def memory(self) -> list[tuple[int, int]]:
        """`(tokens, bytes that their capture added)` in the order of capture."""
        return [(size, entry.nbytes) for size, entry in self._captured.items()]

    @property
    def output_bytes(self) -> int:
        """Bytes of the static attention outputs, which all buckets share."""
        return self._outputs.nbytes()

    def _traits_of(self, mode: ForwardMode) -> Traits:
        found = self._traits.get(mode)
        if found is None:
            found = self.backend.traits(mode)
            check_backend(self.backend, found, mode)
            self._traits[mode] = found
        return found
