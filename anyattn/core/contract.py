"""The contract of attention: `AttentionBackend`, a `StepBackend` that adapters derive from.

An adapter supplies `forward_decode` and `forward_extend` (and `forward_mixed` where it has one), and
planning of its own in `plan_private`. Tables, checks, KV writes, shapes and padding are done here, once.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod

import torch

from anyattn.core.backend_config import BackendConfig
from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.call import AttentionCall, LayerInputs, LayerOutput
from anyattn.core.capabilities import Feature
from anyattn.core.feature_check import layer_features
from anyattn.core.groups import PlanGroup
from anyattn.core.known_layer import KnownLayer, PlainCall
from anyattn.core.layer import AttentionLayer
from anyattn.core.layer_checks import (
    another_plan,
    check_no_prefix,
    check_owns_kv,
    check_pool_is_listed,
    check_storage,
    no_slots,
)
from anyattn.core.metadata.buffers import StepBuffers
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.metadata.eager import EagerPlans
from anyattn.core.metadata.segments import SegmentMetadata
from anyattn.core.mla_inputs import as_whole
from anyattn.core.mla_step import MLAPlanner
from anyattn.core.plan import Plan
from anyattn.core.shapes import checked_heads, lse_like, output_like
from anyattn.core.spec import AttentionKind, Limits
from anyattn.core.step_backend import StepBackend
from anyattn.core.step_checks import asks_nothing, check_served, declared_traits
from anyattn.core.strategy import Strategy
from anyattn.core.traits import Traits
from anyattn.errors import FeatureError, GraphError, PlanError

__all__ = ["AttentionBackend", "BackendConfig", "StepBackend"]

_owners = itertools.count(1)


class AttentionBackend(StepBackend):
    """Softmax attention over paged KV. Subclasses are adapters to one kernel family."""

    translates_reads = False
    """Its kernels read the request table themselves and translate through `KVPool.slot_map`."""

    def __init__(self, config: BackendConfig) -> None:
        self.config = config
        self.pool, self.table, self._dtype = config.pool, config.table, config.dtype
        self._features = {mode: frozenset(config.row_for(mode).features) for mode in ForwardMode}
        self.owner = next(_owners)
        self.compiler = MetadataCompiler(config.groups, config.form, config.pool, config.table, self.owner)
        self._eager = EagerPlans(self.compiler, usable=type(self).renews is not AttentionBackend.renews)
        self.mla = MLAPlanner(config.pool.specs, config.row_for, config.table, config.deterministic)
        self._buffers: StepBuffers | None = None
        self._segments: SegmentMetadata | None = None
        self._shares_kv = any(s.kv_shared_with is not None for s in config.pool.specs)
        self._known_layers: dict[tuple[int, ForwardMode], KnownLayer] = {}
        self._known_traits: dict[ForwardMode, Traits] = {}

    def features(self, mode: ForwardMode) -> frozenset[Feature]:
        """What calls and layers may ask for in `mode`; everything else is refused."""
        return self._features[mode]

    def restrict(self, mode: ForwardMode, features: frozenset[Feature]) -> None:
        """From now on refuse the rest in `mode`: a route takes what all its members do."""
        self._features[mode] &= features
        self._known_layers.clear()

    # -- preparation ---------------------------------------------------------------------------------

    def init_forward_metadata(self, batch: ForwardBatch) -> Plan:
        """Eager preparation in memory of its own: such plans never touch what a graph reads."""
        plan = self._eager.renewed(batch, self._check_batch, self.renews)
        if plan is None:
            plan = self._eager.kept(self._prepare(batch, None, in_capture=False))
        else:
            self.replan(plan)
        self.init_forward_metadata_in_graph(plan)
        return plan

    def traits(self, mode: ForwardMode) -> Traits:
        """From the capability row; an adapter overrides what a row cannot say."""
        return declared_traits(self.config.row_for(mode))

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, *, in_capture: bool = False, captured: Plan | None = None
    ) -> Plan:
        """Checks, upload and storage by the compiler, then the family's own planning.

        Raises:
            BatchError, HostLengthError, FeatureError: a batch that this backend can't run.
            GraphError: a capture without buffers, a batch of another shape than the captured one.
        """
        if captured is not None:
            again = captured.again.get(batch.num_padding_requests)
            if again is None or not again(captured, batch):
                self._refresh(captured, batch)
            if batch.forward_mode is not ForwardMode.IDLE:
                self.replan(captured)
            return captured
        # A split prefill's plan is still wanted after the steps in between have used the buffers.
        buffers = None if batch.forward_mode is ForwardMode.SPLIT_PREFILL else self._buffers
        if in_capture and buffers is None:
            raise GraphError(
                "a step is captured before there are buffers at fixed addresses",
                asked=batch.forward_mode.value,
                allowed="any mode but a split prefill, after init_cuda_graph_state",
                hint="backend.init_cuda_graph_state(limits) once, for the largest batch",
            )
        return self._prepare(batch, buffers, in_capture)

    def _prepare(self, batch: ForwardBatch, buffers: StepBuffers | None, in_capture: bool) -> Plan:
        traits = self._check_batch(batch)
        # Layers that share KV pass none of their own: they read everything through the table.
        # A graph is one strategy: the one that serves every split of a request into cached and new.
        paged = self._shares_kv or in_capture
        plan = self.compiler.prepare(
            batch, buffers, tree_mask=traits.tree_mask, in_capture=in_capture,
            strategies=(Strategy.PAGED,) if paged else traits.strategies,
        )  # fmt: skip
        self.mla.prepare(plan, in_capture=in_capture)
        if batch.forward_mode is not ForwardMode.IDLE:
            self.plan_private(plan, in_capture=in_capture)
        return plan

    def _refresh(self, captured: Plan, batch: ForwardBatch) -> None:
        """Before a replay: the batch's values at the captured addresses."""
        traits = self._check_batch(batch)
        self.compiler.refresh(captured, batch, tree_mask=traits.tree_mask)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Offsets, positions and tables on the device."""
        if plan.key.mode is ForwardMode.IDLE:
            return
        self.compiler.fill(plan)
        self.mla.fill(plan)
        self.compiler.check(plan)

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Family-specific host planning; results go to `plan.private`. Default: none."""

    def renews(self, plan: Plan, batch: ForwardBatch) -> bool:
        """`plan.private` of an earlier decode step, which nobody holds any more, is right for `batch`, of the
        same shape, too. By default it isn't known to be, and such plans are made anew.
        """
        return False

    def replan(self, plan: Plan) -> None:
        """Before a replay, and for an eager plan that takes another batch (`renews`): whatever of
        `plan.private` depends on lengths; at its captured addresses.

        Default: `plan_private` again, for families whose planning reuses what it made for this shape.
        """
        self.plan_private(plan, in_capture=False)

    def init_cuda_graph_state(self, limits: Limits) -> None:
        """Buffers at fixed addresses for steps that are captured, sized by `limits`."""
        self._buffers = StepBuffers(limits, self.config.form, self.pool.device)

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, batch: ForwardBatch) -> Plan:
        """Vectors at addresses of their own. Raises `BatchError` beyond the limits of `select`."""
        if self._segments is None:
            c = self.config
            self._segments = SegmentMetadata(c.limits, c.form, self.pool, self.table, self.owner)
        return self._segments.capture(batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, captured: Plan, batch: ForwardBatch
    ) -> None:
        """This step's vectors at those addresses: one upload, and the device half."""
        assert self._segments is not None
        self._segments.refresh(captured, batch)

    def _check_batch(self, batch: ForwardBatch) -> Traits:
        mode = batch.forward_mode
        traits = self._known_traits.get(mode) or self._traits_of(mode)
        if not asks_nothing(batch, traits):
            for feature, who in check_served(batch, traits, self.config.name, self.config.limits):
                self._require(feature, mode, who)
        return traits

    # -- compute -------------------------------------------------------------------------------------

    @abstractmethod
    def forward_decode(self, call: AttentionCall) -> None:
        """One query token per request. Writes `call.out` (and `call.lse`, sinks included)."""

    @abstractmethod
    def forward_extend(self, call: AttentionCall) -> None:
        """Any number of query tokens per request. Writes `call.out` (and `call.lse`, sinks included)."""

    def forward_mixed(self, call: AttentionCall) -> None:
        """Prefill chunks and decode rows together; by default an extend."""
        self.forward_extend(call)

    def forward(  # anyattn: in-graph
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
        """The template of every call: check, shape, store, dispatch by mode. See `AttentionLayer.forward`."""
        known = self._check_plan(plan, batch, layer)
        group = known.group
        plain = known.plain and not return_lse and lse_out is None and inputs is None
        if plain and save_kv_cache and k is not None and v is not None:
            made = known.call(self, q, k, v, out, plan)
            if made is not None:
                if batch.num_padding_tokens:
                    self._clear_padding(batch, made, None)
                return LayerOutput(made)
        shape = spec = layer.spec
        if spec.mla is not None:
            q, k, v, shape = as_whole(q, k, v, spec, plan.mla_method, inputs)
        q3, k3, v3 = checked_heads(q, k, v, spec, plan.key.num_tokens, self._dtype, shape.head_dim)
        result, out3 = output_like(q, shape, out, self._dtype)
        lse = None
        if return_lse or lse_out is not None:
            lse = self._lse_buffer(q3, return_lse, lse_out, batch.forward_mode)
        if inputs is not None:
            for name, feature in inputs.features():
                self._require(feature, batch.forward_mode, f"LayerInputs.{name}")
        if batch.forward_mode is ForwardMode.IDLE:
            return LayerOutput(result, lse)
        stored = self._store(layer, group, k3, v3, plan, save_kv_cache)
        table = plan.tables.get(group.table)
        call = AttentionCall(q3, k3, v3, layer, plan, table, out3, lse, stored, group, inputs, out is None)
        getattr(self, known.method)(call)
        self._clear_padding(batch, call.out, lse)
        if call.out is not out3:
            result = call.out.reshape(result.shape)
        return LayerOutput(result, lse)

    @staticmethod
    def _clear_padding(batch: ForwardBatch, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        # Padded rows of eager steps are zero, and have seen no key.
        if batch.num_padding_tokens and batch.captured_mode is None:
            padding = slice(batch.num_tokens - batch.num_padding_tokens, None)
            out[padding] = 0
            if lse is not None:
                lse[padding] = -torch.inf

    def _traits_of(self, mode: ForwardMode) -> Traits:
        found = self._known_traits.get(mode)
        if found is None:
            found = self._known_traits[mode] = self.traits(mode)
        return found

    @staticmethod
    def _method(mode: ForwardMode, layer: AttentionLayer) -> str:
        """What computes it."""
        if mode is ForwardMode.DECODE and layer.spec.kind is not AttentionKind.ENCODER_ONLY:
            return "forward_decode"
        return "forward_mixed" if mode is ForwardMode.MIXED else "forward_extend"

    def _check_plan(self, plan: Plan, batch: ForwardBatch, layer: AttentionLayer) -> KnownLayer:
        key = plan.key
        if key.serial != batch.serial or key.owner != self.owner:
            raise another_plan(plan, batch, self.config.name)
        known = self._known_layers.get((layer.layer_id, key.mode))
        if known is None or known.layer is not layer:
            group, method = self._check_layer(layer, key.mode), self._method(key.mode, layer)
            at_once = self.at_once(layer, key.mode, group)
            known = KnownLayer(layer, key.mode, group, method, self._dtype, at_once)
            self._known_layers[layer.layer_id, key.mode] = known
        return known

    def at_once(self, layer: AttentionLayer, mode: ForwardMode, group: PlanGroup) -> PlainCall | None:
        """What stores and computes a layer's plain calls in one go; by default two methods do."""
        return None

    def _check_layer(self, layer: AttentionLayer, mode: ForwardMode) -> PlanGroup:
        """Once per layer and mode: its plan group here is planned, for its heads, with its features."""
        groups, group = self.config.groups.max_q_heads, self.config.groups.locate(layer.plan_group)
        planned = groups.get(group)
        if planned is None or layer.spec.num_q_heads > planned:
            raise PlanError(
                f"layer {layer.layer_id} was not planned for",
                asked=f"{layer.spec.num_q_heads} query heads of {group}",
                allowed="; ".join(f"<= {n} heads of {g}" for g, n in groups.items()),
                hint="list every layer's AttentionSpec in select()",
            )
        for feature in layer_features(layer.spec):
            self._require(feature, mode, f"layer {layer.layer_id}")
        check_storage(self.pool, layer)
        if not all(scale.is_one for scale in self.pool.scales(layer.layer_id)):
            self._require(Feature.KV_SCALES, mode, f"the pool's scales of layer {layer.layer_id}")
        return group

    def _require(self, feature: Feature, mode: ForwardMode, who: str) -> None:
        declared = self._features[mode]
        if feature not in declared:
            raise FeatureError(
                f"{self.config.name} does not support {feature.value} in {mode.value} (asked by {who})",
                asked=feature.value,
                allowed=", ".join(sorted(f.value for f in declared)) or "plain causal attention",
                hint=f"select(..., features=[Feature.{feature.name}]) picks a backend that does",
            )

    def _lse_buffer(
        self, q: torch.Tensor, wanted: bool, lse_out: torch.Tensor | None, mode: ForwardMode
    ) -> torch.Tensor | None:
        if wanted:
            self._require(Feature.LSE, mode, "return_lse")
        return lse_like(q, lse_out, wanted)

    def _store(
        self, layer: AttentionLayer, group: PlanGroup, k: torch.Tensor | None, v: torch.Tensor | None,
        plan: Plan, save: bool,
    ) -> bool:  # fmt: skip
        """Write this step's KV. True if k and v (or everything) can be read from the pool."""
        kind = layer.spec.kind
        if k is None or v is None:
            check_pool_is_listed(plan, layer)
            return True
        if kind is AttentionKind.ENCODER_ONLY:
            check_no_prefix(plan)
            return False
        check_owns_kv(layer)
        if not save:
            self._require(Feature.NO_CACHE_WRITE, plan.key.mode, "save_kv_cache=False")
            return False
        loc = plan.write_loc(group.table)
        if loc is None or loc.shape[0] != k.shape[0]:
            raise no_slots(loc, k, group)
        self.write_kv(layer, loc, k, v)
        return True

    def write_kv(self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store `k [T, Hkv, D]`, `v [T, Hkv, Dv]`; a family with a faster writer overrides it."""
        self.pool.write(layer.layer_id, loc, k, v)
