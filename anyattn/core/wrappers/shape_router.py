"""`ShapeRouter`: several backends for one phase, on one pool; each step goes to one of them by its size.

The choice is made before planning, from what the host knows: requests, KV length, new tokens. Everything
later follows the plan, which names its owner. A graph is of one route: `GraphRunner` captures one for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from anyattn.core.arguments import check_instance
from anyattn.core.backend_config import BackendConfig
from anyattn.core.batch import Exact, ForwardBatch, ForwardMode, UpperBound
from anyattn.core.call import LayerInputs, LayerOutput
from anyattn.core.contract import AttentionBackend, StepBackend
from anyattn.core.layer import AttentionLayer
from anyattn.core.measure.bucket import EAGER, GRAPH
from anyattn.core.measure.rules import RouteMap, RouteRule
from anyattn.core.plan import Plan
from anyattn.core.spec import Limits
from anyattn.core.step_checks import check_served
from anyattn.core.traits import Determinism, Traits
from anyattn.errors import ConfigError, PlanError

__all__ = ["ShapeRouter", "step_size"]


def step_size(batch: ForwardBatch) -> tuple[float, float | None, float, float]:
    """(requests, mean KV length, mean new tokens, prompts) of a step without padding, as the host knows it.

    The KV length is the bound where only that is known, and None where nothing is. Prompts are the requests
    of a mixed step that don't decode, and its new tokens are theirs; other steps have 0.
    """
    real = max(1, batch.batch_size - batch.num_padding_requests)
    tokens, prompts = max(0, batch.num_tokens - batch.num_padding_tokens), 0
    new: float = tokens / real
    if batch.forward_mode is ForwardMode.MIXED:
        prompts = max(0, real - batch.num_decode)
        new = max(0, tokens - batch.num_decode) / prompts if prompts else 1
    known = batch.host_lens
    if isinstance(known, Exact):
        lens = known.seq_lens[:real] if batch.num_padding_requests else known.seq_lens
        return real, int(lens.sum()) / real, new, prompts
    return real, known.max_seq_len if isinstance(known, UpperBound) else None, new, prompts


class ShapeRouter(StepBackend):
    """Routes each step to one member; a plan of the router *is* that member's plan.

    Members write KV alike (one pool, one layout, one dtype), so steps may change hands at any time.
    """

    def __init__(self, members: Iterable[AttentionBackend], rules: Iterable[RouteRule]) -> None:
        """The first member takes steps whose KV length the host doesn't know, and IDLE ones.

        Raises:
            ConfigError: fewer than two members, a name twice, members that are no plain backends or don't
                share pool, table and KV conventions, rules that name nobody here.
        """
        hint = "create_backend makes one of each decision"
        self.all = tuple(
            check_instance("member of a route", member, AttentionBackend, hint)  # type: ignore[type-abstract]
            for member in members
        )
        self.members = {member.config.name: member for member in self.all}
        self.children = self.all
        _check_members(self.all, self.members)
        first = self.first
        self.map = RouteMap(first.config.name, rules)
        strangers = {rule.backend for rule in self.map.rules} - set(self.members)
        if strangers:
            asked, allowed = ", ".join(sorted(strangers)), ", ".join(self.members)
            raise ConfigError("rules of a route name its members", asked=asked, allowed=allowed)
        self.pool, self.table = first.pool, first.table
        self._by_owner = {member.owner: member for member in self.all}
        self._traits: dict[ForwardMode, Traits] = {}

    @property
    def first(self) -> AttentionBackend:
        """Who takes the steps that no rule can speak of."""
        return self.all[0]

    @property
    def config(self) -> BackendConfig:
        """Of the first member, under the names of all."""
        return replace(self.first.config, name="+".join(self.members))

    # -- the route -----------------------------------------------------------------------------------

    def routes(self, mode: ForwardMode) -> tuple[str, ...]:
        """All members."""
        return tuple(self.members)

    def route_of(self, batch: ForwardBatch) -> str:
        """The member that takes this step when it's replayed."""
        return self._name(batch, GRAPH)

    def why(self, batch: ForwardBatch, run: str = GRAPH) -> str:
        """Who takes a step that is run so, and the row of the measured table that says it."""
        name, size = self._name(batch, run), step_size(batch)
        rule = None if batch.forward_mode is ForwardMode.IDLE else self.map.rule(run, *size)
        if rule is None:
            return f"{batch.forward_mode.value} ({run}): {name}, no rule speaks of this step"
        return f"{batch.forward_mode.value} ({run}): {name}, as measured at {rule} ({rule.run})"

    def routed(self, mode: ForwardMode, route: str) -> StepBackend:
        """That member. Raises `ConfigError` for a name that none has."""
        if mode not in self._traits:
            self._agree(mode)
        if route not in self.members:
            raise ConfigError("route of a step", asked=route, allowed=", ".join(self.members))
        return self.members[route]

    def _name(self, batch: ForwardBatch, run: str) -> str:
        """The member for a batch that any of them could take: what is refused doesn't depend on the route."""
        traits = self._traits.get(batch.forward_mode) or self._agree(batch.forward_mode)
        if batch.forward_mode is ForwardMode.IDLE:
            return self.map.default
        if batch.exact is None or batch.forward_mode is ForwardMode.MIXED:
            for _ in check_served(batch, traits, "+".join(self.members), self.first.config.limits):
                pass  # features are the member's to refuse
        return self.map.backend(run, *step_size(batch))

    def _agree(self, mode: ForwardMode) -> Traits:
        """Once a mode: members refuse what one of them doesn't declare."""
        common = frozenset.intersection(*(member.features(mode) for member in self.all))
        for member in self.all:
            member.restrict(mode, common)
        traits = self._traits[mode] = self.traits(mode)
        return traits

    def _owner(self, plan: Plan) -> AttentionBackend:
        member = self._by_owner.get(plan.key.owner)
        if member is None:
            raise PlanError(
                "the plan was made by a backend outside this route",
                asked=f"a plan of {plan.key.mode.value}",
                allowed=f"plans of {', '.join(self.members)}",
                hint="init_forward_metadata of the backend that is in the forward context",
            )
        return member

    # -- the contract --------------------------------------------------------------------------------

    def traits(self, mode: ForwardMode) -> Traits:
        """What holds whoever takes the step; the route depends on the batch, so it isn't batch-invariant."""
        found = Traits.combine(member.traits(mode) for member in self.all)
        return replace(found, determinism=min(found.determinism, Determinism.RUN_TO_RUN))

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Eager, by the member that the eager times choose."""
        return self.members[self._name(batch, EAGER)].init_forward_metadata(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, *, in_capture: bool = False, captured: Plan | None = None
    ) -> Plan:
        """Host half: by the member that made `captured`, else by the route of the batch."""
        member = self.members[self.route_of(batch)] if captured is None else self._owner(captured)
        return member.init_forward_metadata_out_graph(batch, in_capture=in_capture, captured=captured)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Device half, by the member that made the plan."""
        self._owner(plan).init_forward_metadata_in_graph(plan)

    def init_cuda_graph_state(self, limits: Limits) -> None:
        """All members: each has graphs of its own."""
        for member in self.all:
            member.init_cuda_graph_state(limits)

    def get_cuda_graph_seq_len_fill_value(self, mode: ForwardMode, tokens_per_request: int) -> int:
        """The largest of the members': who wants 0 or 1 takes a longer one."""
        return max(m.get_cuda_graph_seq_len_fill_value(mode, tokens_per_request) for m in self.all)

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: ForwardBatch) -> Plan:
        """By the first member: segments read the same vectors whoever attends between them."""
        return self.first.init_forward_metadata_for_breakable_cuda_graph_capture(batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: Plan, batch: ForwardBatch
    ) -> None:
        """By the same member."""
        self.first.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, batch)

    def commit(self, batch: ForwardBatch, accepted_lens: torch.Tensor) -> None:
        """To all: any of them may have verified."""
        for member in self.all:
            member.commit(batch, accepted_lens)

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
        """The `forward` of the member that made the plan."""
        return self._owner(plan).forward(
            q, k, v, layer, batch,
            save_kv_cache=save_kv_cache, return_lse=return_lse, out=out, lse_out=lse_out, inputs=inputs,
            plan=plan,
        )  # fmt: skip


def _check_members(members: Sequence[AttentionBackend], names: dict[str, AttentionBackend]) -> None:
    if len(members) < 2 or len(names) < len(members):
        asked = ", ".join(member.config.name for member in members) or "nobody"
        raise ConfigError("members of a route", asked=asked, allowed="two different backends or more")
    first = members[0]
    if any(m.pool is not first.pool or m.table is not first.table for m in members):
        raise ConfigError("the backends of a route share one pool and one request table")
    if first.pool.kv_dtype is first.config.dtype:
        return
    for mode in ForwardMode:
        reads = {m.config.name: m.traits(mode).kv_read.value for m in members}
        if len(set(reads.values())) > 1:
            told = ", ".join(f"{name} {read}" for name, read in reads.items())
            raise ConfigError(
                f"members of a route see a step's own tokens alike in {mode.value}",
                asked=told,
                allowed="all as stored, or all as given, where the KV dtype isn't the model's",
                hint="leave one out, or choose a KV pool of the model's dtype",
            )
