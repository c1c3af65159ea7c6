"""`flashinfer` for dense models: its decode, paged, ragged and sink wrappers, planned once a step.

Conventions of the library (flashinfer-python 0.6 and 0.7): windows count the keys to the left (W - 1); LSE is
base 2, `[T, Hq]`; causal is bottom-right; k scales go into the softmax scale, v scales onto the output.
What is built for which call: docs/flashinfer-variants.md.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from typing import Any

import torch

from anyattn.backends.cuda.flashinfer_launch import DecodeCalls
from anyattn.backends.cuda.flashinfer_layers import Layer, number, per_head
from anyattn.backends.cuda.flashinfer_lease import Wrappers
from anyattn.backends.cuda.flashinfer_plan import HostArrays, inner_backend, merge_fits, workspace_bytes
from anyattn.backends.cuda.flashinfer_step import Setup, Step, StepPlanner, plan_again
from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.backends.cuda.fused_writes import FusedWrites
from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.known_layer import PlainCall
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.metadata.packed_masks import pack_mask
from anyattn.core.plan import Plan
from anyattn.core.rows import aligned
from anyattn.core.state import AttentionState
from anyattn.core.strategy import Strategy
from anyattn.core.traits import SharedReadEnds, Traits
from anyattn.errors import FeatureError, PoolError

__all__ = ["FlashInfer"]

_LN2 = math.log(2.0)


class FlashInfer(FusedWrites):
    """Paged decode and prefill; ragged prefill, merged with a cached prefix where no window crosses it.

    A *slot* is a plan group at one query head count: the fa2 template's tiles are cut for one group size.
    """

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't NHD or HND."""
        self._library = importlib.import_module("flashinfer")
        super().__init__(config)
        pool = self.pool
        if not isinstance(pool, MHAPool) or pool.layout not in ("NHD", "HND"):
            have = f"{type(pool).__name__} ({pool.layout})"
            raise PoolError("flashinfer reads MHA pools", asked=have, allowed="MHAPool in NHD or HND")
        slots = {(config.groups.locate(PlanGroup.of(s)), s.num_q_heads): None for s in pool.specs}
        self._slots: tuple[tuple[PlanGroup, int], ...] = tuple(slots)
        size = workspace_bytes(self._slots, pool.device)
        workspace = torch.zeros(size, dtype=torch.uint8, device=pool.device)
        self._setup = Setup(
            slots=self._slots,
            inner={mode: inner_backend(config.row_for(mode)) for mode in ForwardMode},
            wrappers=Wrappers(self._library, pool.layout, workspace),
            dtype=config.dtype,
            kv_dtype=pool.kv_dtype,
            device=pool.device,
        )
        self._strategies = self._offered()
        self._layers: dict[int, Layer] = {}
        offer_filler(self.compiler, config.table)

    def _offered(self) -> tuple[Strategy, ...]:
        """Ragged parts need keys as given = keys as stored, and a wrapper without sinks. The window rule of a
        prefix alone depends on each request's new tokens, which one `window_left` can't say.

        Hopper's kernel reads a cached prefix and new tokens through the table in one call: on an H200 that
        took 0.82 to 1.00 of the time of both parts and their merge, and the host calls once, not three times.
        """
        if self.pool.kv_dtype != self.config.dtype or any(g.sinks for g, _ in self._slots):
            return (Strategy.PAGED,)
        windows = any(g.table.window is not None for g, _ in self._slots)
        one_call = windows or self._setup.inner[ForwardMode.EXTEND] == "fa3"
        ragged = (Strategy.RAGGED,) if one_call else (Strategy.RAGGED, Strategy.RAGGED_MERGE)
        return (*ragged, Strategy.PAGED)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables and masks are copied with `init_forward_metadata_in_graph`."""
        extends = mode in (ForwardMode.EXTEND, ForwardMode.SPLIT_PREFILL)
        return replace(
            super().traits(mode),
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            strategies=self._strategies if extends else (Strategy.PAGED,),
        )

    # -- planning ------------------------------------------------------------------------------------

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """One `plan` a slot and part, from host arrays. Raises `FeatureError` for a mask in a capture."""
        if in_capture and plan.mask_cells is not None:
            raise FeatureError(
                "flashinfer packs masks of each step's own size, which a graph can't record",
                asked="an explicit mask in a capture",
                allowed="chains of draft tokens, or eager steps",
                hint="leave the mask out of captured steps, or run tree verification eagerly",
            )
        host = HostArrays(plan)
        plan.private = Step(num_tokens=host.num_tokens)
        if host.num_tokens:
            StepPlanner(self._setup, plan, host, in_capture=in_capture).run()

    def renews(self, plan: Plan, batch: ForwardBatch) -> bool:
        """The same wrappers, planned again."""
        return True

    def replan(self, plan: Plan) -> None:
        """Plan the captured wrappers again, on the same addresses, or those of an eager plan."""
        if plan_again(self._setup, plan):
            return  # a decode step of as many requests: as many tokens, too
        host = HostArrays(plan)
        plan.private.num_tokens = host.num_tokens
        plan.private.lease = None  # which gives an eager plan's wrappers back, to be lent at once
        StepPlanner(self._setup, plan, host, in_capture=False).run()

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Offsets, positions and tables, then the mask bits that wrappers were given the storage of."""
        super().init_forward_metadata_in_graph(plan)
        if plan.private is not None:
            for table, (window, bits) in plan.private.masks.items():
                pack_mask(plan, table, window, bits)

    # -- compute -------------------------------------------------------------------------------------

    def at_once(self, layer: AttentionLayer, mode: ForwardMode, group: PlanGroup) -> PlainCall | None:
        """Decode of layers without scales and sinks repeats its launch."""
        spec = layer.spec
        if mode is not ForwardMode.DECODE or spec.head_dim != spec.v_head_dim:
            return None
        own = self._layer_of(layer, group)
        if not own.plain:
            return None
        heads = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
        return DecodeCalls(own.slot, own.cache, heads, self.config.dtype, self.store_of(layer))

    def forward_decode(self, call: AttentionCall) -> None:
        """One query a request over its table."""
        layer = self._layers.get(call.layer.layer_id)
        if layer is None or layer.layer is not call.layer:
            layer = self._layer(call)
        step: Step = call.plan.private
        wrapper, q, out, lse = step.runs[layer.slot].keys, call.q, call.out, call.lse
        if lse is None and layer.plain and _as_stored(q) and _as_stored(out):
            if step.launches:
                step.launches[layer.slot].run(q, layer.cache, out)
            else:
                wrapper.run(q, layer.cache, out=out)
            return
        self._over_table(wrapper, q, layer, out, lse)
        if lse is not None:
            lse.mul_(_LN2)

    def forward_extend(self, call: AttentionCall) -> None:
        """Everything through the table, or k and v alone, or both merged."""
        step, layer = call.plan.private, self._layer(call)
        num = step.num_tokens
        if num == 0:
            return
        q, out, lse = call.q[:num], call.out[:num], None if call.lse is None else call.lse[:num]
        keys, own = step.runs[layer.slot]
        if own is None:
            self._over_table(keys, q, layer, out, lse)
        elif keys is None:
            self._over_own(own, q, call, out, lse)
        else:
            if lse is None:
                lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            self._over_own(own, q, call, out, lse)
            before, weight = torch.empty_like(out), torch.empty_like(lse)
            self._over_table(keys, q, layer, before, weight)
            self._merge(out, lse, before, weight)
        if lse is not None:
            lse.mul_(_LN2)

    def _over_table(
        self, wrapper: Any, q: torch.Tensor, layer: Layer, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """`lse` in base 2."""
        if not _dense(out, lse):
            self._densely(lambda o, s: self._over_table(wrapper, q, layer, o, s), out, lse)
            return
        q = aligned(q)
        if layer.sinks is not None:
            wrapper.run(q, layer.cache, layer.sinks, layer.layer.spec.scale, out=out)
            return
        if layer.k_heads is not None:
            q = (q * layer.k_heads).to(q.dtype)
        wrapper.run(
            q, layer.cache, k_scale=layer.k_scale, v_scale=layer.v_scale, out=out, lse=lse,
            return_lse=lse is not None,
        )  # fmt: skip
        if layer.v_heads is not None:
            out.mul_(layer.v_heads)

    def _over_own(
        self, wrapper: Any, q: torch.Tensor, call: AttentionCall, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """`lse` in base 2."""
        if not _dense(out, lse):
            self._densely(lambda o, s: self._over_own(wrapper, q, call, o, s), out, lse)
            return
        assert call.k is not None
        assert call.v is not None
        k, v = (aligned(x[: q.shape[0]]) for x in (call.k, call.v))
        wrapper.run(aligned(q), k, v, out=out, lse=lse, return_lse=lse is not None)

    @staticmethod
    def _densely(run: Any, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        weight = None if lse is None else torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        run(dense, weight)
        out.copy_(dense)
        if lse is not None and weight is not None:
            lse.copy_(weight)

    def _merge(
        self, out: torch.Tensor, lse: torch.Tensor, before: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """The cached part into `out` and `lse`, both in base 2; each query's own key keeps its lse finite."""
        if (
            out.is_contiguous()
            and lse.is_contiguous()
            and merge_fits(out.shape[1], out.shape[2], out.element_size())
        ):
            self._library.merge_state_in_place(out, lse, before, weight)
            return
        merged = AttentionState(out, lse * _LN2).merge(AttentionState(before, weight * _LN2))
        out.copy_(merged.out)
        torch.mul(merged.lse, 1 / _LN2, out=lse)

    def _layer(self, call: AttentionCall) -> Layer:
        return self._layer_of(call.layer, call.group)

    def _layer_of(self, layer: AttentionLayer, group: PlanGroup) -> Layer:
        known = self._layers.get(layer.layer_id)
        if known is None or known.layer is not layer:
            known = self._layers[layer.layer_id] = self._new_layer(layer, group)
        return known

    def _new_layer(self, layer: AttentionLayer, group: PlanGroup) -> Layer:
        pool, spec = self.pool, layer.spec
        assert isinstance(pool, MHAPool)
        cache = pool.key_cache(layer.layer_id), pool.value_cache(layer.layer_id)
        if (group, spec.num_q_heads) not in self._slots:
            heads = sorted(n for g, n in self._slots if g == group)
            raise FeatureError(
                f"layer {layer.layer_id} has a head count that flashinfer plans nothing for",
                asked=spec.num_q_heads,
                allowed=heads,
                hint="list every layer's AttentionSpec in select()",
            )
        k, v = pool.scales(layer.layer_id)
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        return Layer(
            layer, self._slots.index((group, spec.num_q_heads)), cache, number(k), number(v),
            per_head(k, spec.group_size), per_head(v, spec.group_size), sinks,
        )  # fmt: skip


def _as_stored(x: torch.Tensor) -> bool:
    """Kernels can load and store it as it is: dense rows (whose heads are whole multiples of 16 bytes)."""
    return x.is_contiguous() and not x.data_ptr() & 15


def _dense(out: torch.Tensor, lse: torch.Tensor | None) -> bool:
    """Kernels write dense rows."""
    return _as_stored(out) and (lse is None or lse.is_contiguous())
