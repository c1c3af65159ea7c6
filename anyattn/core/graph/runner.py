"""`GraphRunner`: a model step captured once a bucket, and replayed for every batch that fits.

One preparation path: `init_forward_metadata_out_graph` before the capture and before each replay (there with
`captured=`), `init_forward_metadata_in_graph` inside the graph. The runner owns all that a graph reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.context import forward_context
from anyattn.core.graph.admission import check_capturable, check_replayable, example_batch
from anyattn.core.graph.buckets import Buckets, GraphKey
from anyattn.core.graph.objects import Fence, GraphObject, GraphPlatform
from anyattn.core.graph.padding import Padder
from anyattn.core.graph.static import PoolGuard, copy_in, cut
from anyattn.core.masks import VerifyMask
from anyattn.core.plan import Plan
from anyattn.core.spec import Limits
from anyattn.core.traits import SharedReadEnds
from anyattn.errors import GraphError

__all__ = ["Body", "Captured", "GraphRunner"]

Body = Callable[..., Any]
"""`body(batch, **inputs) -> outputs`: the step that is captured, from static inputs to a tensor, or a tuple
or dictionary of tensors whose first axis is tokens."""


@dataclass(eq=False)
class Captured:
    """One graph and everything that it reads: a graph keeps nothing alive by itself."""

    key: GraphKey
    graph: GraphObject
    plan: Plan
    padder: Padder
    inputs: Mapping[str, torch.Tensor]
    outputs: Any
    nbytes: int
    read_ends: SharedReadEnds


class GraphRunner:
    """Captures and replays one body on one backend.

    Args:
        inputs: static buffers by name, `[max_tokens, …]`; a replay copies the step's values in.
        early_tables: tables are filled before the replay instead of inside the graph. Where kernels read
            copies only (`SharedReadEnds.IN_REPLAY`), `read_done` then passes while the graph still runs, so
            that a scheduler may prepare its next step meanwhile. Costs the launches of the tables.
    """

    def __init__(
        self,
        backend: Any,
        body: Body,
        platform: GraphPlatform,
        *,
        limits: Limits,
        inputs: Mapping[str, torch.Tensor] | None = None,
        buckets: Buckets | None = None,
        early_tables: bool = False,
    ) -> None:
        """Allocates the backend's buffers for `limits` (`init_cuda_graph_state`), once."""
        self.backend, self.platform, self.limits = backend, platform, limits
        self.buckets = buckets or Buckets.up_to(limits.max_requests)
        self.inputs = dict(inputs or {})
        self.read_done: Fence = platform.new_fence()
        """Behind it, nothing of the last replay reads what a scheduler owns: tables, batch, inputs."""
        self._body, self._early = body, early_tables
        self._captured: dict[GraphKey, Captured] = {}
        self._decodes: dict[tuple[int, str], Captured] = {}
        self._masks: dict[tuple[ForwardMode, int], VerifyMask | None] = {}
        backend.init_cuda_graph_state(limits)
        self._guard = PoolGuard(backend)

    # -- capture -------------------------------------------------------------------------------------

    def capture(
        self,
        mode: ForwardMode = ForwardMode.DECODE,
        *,
        tokens_per_request: int = 1,
        mask: VerifyMask | None = None,
        example: ForwardBatch | None = None,
    ) -> None:
        """Capture `mode` for every bucket, the largest first: smaller ones then live in its memory.

        Where a `ShapeRouter` serves the mode, there is a graph for each of its members.

        Args:
            tokens_per_request: query tokens of every request (target verification, drafts).
            mask: the tree mask whose buffer replays read, filled in place before each.
            example: a batch with the optional fields (positions, encoder lengths) that replays will have.

        Raises:
            GraphError: the backend can't capture this mode (it says why), a capture inside another one, or
                one that failed.
        """
        self._guard.check_idle("capture")
        check_capturable(self.backend, mode, tokens_per_request, self.limits)
        self._decodes.clear()
        form = "none" if mask is None else mask.mode.value
        for size in reversed(self.buckets.sizes):
            for route in self.backend.routes(mode):
                if size * tokens_per_request <= self.limits.max_tokens:
                    key = GraphKey(mode, size, tokens_per_request, mask=form, route=route)
                    self._capture(key, mask, example)
        self._masks[mode, tokens_per_request] = mask

    def _capture(self, key: GraphKey, mask: VerifyMask | None, example: ForwardBatch | None) -> None:
        serving = self.backend.routed(key.mode, key.route)
        fill = serving.get_cuda_graph_seq_len_fill_value(key.mode, key.tokens_per_request)
        padder = Padder(key, self.backend.table, fill)
        batch = padder.empty(example or example_batch(key, mask))
        before = self.platform.memory_bytes()
        plan = serving.init_forward_metadata_out_graph(batch, in_capture=True)
        inputs = {name: value[: key.num_tokens] for name, value in self.inputs.items()}
        outputs: Any = None

        def run() -> None:
            nonlocal outputs
            if not self._early:
                self.backend.init_forward_metadata_in_graph(plan)
            with forward_context(self.backend, plan):
                outputs = self._body(batch, **inputs)

        self.backend.init_forward_metadata_in_graph(plan)
        run()  # compiles kernels and lets libraries allocate what they keep, outside the capture
        self.platform.synchronize()
        graph = self.platform.new_graph()
        graph.capture(run)
        nbytes = self.platform.memory_bytes() - before
        ends = serving.traits(key.mode).shared_read_ends
        made = Captured(key, graph, plan, padder, inputs, outputs, nbytes, ends)
        self._captured[key] = made

    # -- replay --------------------------------------------------------------------------------------

    def replay(self, batch: ForwardBatch, **inputs: torch.Tensor) -> Any:
        """The body's outputs for `batch`, cut to its own tokens; valid until the next replay.

        `inputs`: `[T, …]` for each static buffer that this step changes.

        Raises:
            GraphError: a mode that wasn't captured, a batch beyond the largest bucket, draft lengths that
                differ, another mask, a pool that was replaced, a capture going on. Nothing was changed then.
            BatchError, HostLengthError: as in eager preparation.
        """
        self._guard.check_idle("replay")
        entry = self.entry(batch)
        self.prepare(entry, batch, inputs)
        entry.graph.replay()
        if entry.read_ends > SharedReadEnds.IN_REPLAY or not self._early:
            self.read_done.record()
        tokens, padded = batch.num_tokens, entry.key.num_tokens
        return entry.outputs if tokens == padded else cut(entry.outputs, tokens, padded)

    def entry(self, batch: ForwardBatch) -> Captured:
        """The captured graph that `batch` runs in. Raises `GraphError` as `replay`."""
        self._guard.check_pool()
        requests, route = batch.req_pool_indices.shape[0], self.backend.route_of(batch)
        # One token a request, no mask, nothing of an encoder to store: all depends on how many they are.
        plain = (
            batch.forward_mode is ForwardMode.DECODE
            and batch.num_tokens == requests
            and batch.mask is None
            and batch.encoder_out_cache_loc is None
        )
        known = self._decodes.get((requests, route)) if plain else None
        if known is not None:
            return known
        tokens, mask = check_replayable(batch, self._masks)
        key = GraphKey(batch.forward_mode, self.buckets.fit(requests), tokens, mask=mask, route=route)
        found = self._captured.get(key)
        if found is None:
            raise GraphError(
                "this step was never captured",
                asked=str(key),
                allowed=", ".join(str(each.key) for each in self._captured.values()) or "nothing yet",
                hint=f"runner.capture(ForwardMode.{batch.forward_mode.name}, tokens_per_request={tokens})",
            )
        if plain:
            self._decodes[requests, route] = found
        return found

    def prepare(self, entry: Captured, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor]) -> None:
        """All that happens before the graph starts: padding, checks, upload, planning, static inputs."""
        padded = entry.padder.pad(batch, entry.plan)
        plan = self.backend.init_forward_metadata_out_graph(padded, captured=entry.plan)
        if self._early:
            self.backend.init_forward_metadata_in_graph(plan)
        for name, value in inputs.items():
            copy_in(entry.inputs[name], value)
        if self._early and entry.read_ends <= SharedReadEnds.IN_REPLAY:
            self.read_done.record()

    def memory(self) -> list[tuple[GraphKey, int]]:
        """Bytes that each capture added on the device, in the order of capture."""
        return [(entry.key, entry.nbytes) for entry in self._captured.values()]

    def can_replay(self, batch: ForwardBatch) -> str | None:
        """None if `replay` would take the batch, else the reason."""
        try:
            self.entry(batch)
        except GraphError as error:
            return str(error)
        return None
