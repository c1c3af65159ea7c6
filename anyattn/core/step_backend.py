"""The contract of anything that prepares once a step: attention, recurrent state, and wrappers of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.plan import Plan
from anyattn.core.spec import Limits
from anyattn.core.traits import Traits
from anyattn.errors import GraphError

if TYPE_CHECKING:
    from anyattn.core.select.decision import Decision

__all__ = ["StepBackend"]


class StepBackend(ABC):
    """Anything that prepares once a step: attention backends, recurrent ones, and wrappers of them."""

    children: Sequence[StepBackend] = ()
    decision: Decision | None = None
    """What this backend was built from; set by `create_backend`."""

    @abstractmethod
    def traits(self, mode: ForwardMode) -> Traits:
        """What this backend declares for `mode`; wrappers compute theirs from their children."""

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Eager preparation: the out-of-graph part, then the in-graph part."""
        plan = self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(plan)
        return plan

    @abstractmethod
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, *, in_capture: bool = False, captured: Plan | None = None
    ) -> Plan:
        """Host work and dynamic shapes: before a capture, before each replay, and first in eager.

        `captured`: the plan that a graph was captured with. Before a replay it takes the new batch's values,
        at the same addresses and without allocating, and is returned.
        """

    @abstractmethod
    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Device work of static shape; recorded in a graph. No host sync, no allocation."""

    @abstractmethod
    def init_cuda_graph_state(self, limits: Limits) -> None:
        """Allocate address-stable buffers once, for the largest batch."""

    def get_cuda_graph_seq_len_fill_value(self, mode: ForwardMode, tokens_per_request: int) -> int:
        """Length that padded requests carry."""
        return tokens_per_request

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: ForwardBatch) -> Plan:
        """A plan for what captured segments of a prefill read between attention layers: vectors, no tables.

        `batch` has the shape of every later step (`graph.breakable_metadata.segment_batch`).

        Raises:
            GraphError: a backend without such plans.
        """
        raise GraphError(
            f"{type(self).__name__} makes no metadata that captured segments could read",
            asked="captured_metadata=True",
            allowed="segments that read inputs alone",
            hint="give positions and the like as inputs of the runner",
        )

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: Plan, batch: ForwardBatch
    ) -> None:
        """Before the segments are replayed: `batch`'s values at the addresses of `captured`.

        Raises:
            GraphError: a batch of another shape. BatchError: as in eager preparation.
        """
        raise GraphError(f"{type(self).__name__} captured no such metadata", asked=captured.key)

    def routes(self, mode: ForwardMode) -> tuple[str, ...]:
        """Names of the backends that steps of `mode` may go to; one without a name where there's no choice.

        A graph is of one route: whoever captures does so for each.
        """
        return ("",)

    def route_of(self, batch: ForwardBatch) -> str:
        """The route of a step that is about to be replayed, by what the host knows of it."""
        return ""

    def routed(self, mode: ForwardMode, route: str) -> StepBackend:
        """The backend that prepares and runs the steps of a route."""
        return self

    def commit(self, batch: ForwardBatch, accepted_lens: torch.Tensor) -> None:  # noqa: B027
        """After verification: keep the state of `accepted_lens` tokens. Attention has none to keep."""
