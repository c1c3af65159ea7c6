"""`triton` for latent layers: absorbed decode and extend, materialised prefill on the dense kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from anyattn.backends.portable.triton import _even
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.groups import PlanGroup
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.mla import materialised_spec
from anyattn.core.mla_keys import KeyPart
from anyattn.core.mla_prefill import run_materialised
from anyattn.core.plan import Plan
from anyattn.core.traits import Determinism, KVRead, SharedReadEnds, Traits
from anyattn.errors import PoolError
from anyattn.kernels.triton import attention as kernels
from anyattn.kernels.triton import mla
from anyattn.kernels.triton.configs import choose_extend
from anyattn.kernels.triton.configs.choose import kernel_arch, num_units
from anyattn.kernels.triton.configs.mla import MLATiles, choose_mla, choose_mla_ranges, choose_splits
from anyattn.kernels.triton.decode_launch import DecodeStep, pieces
from anyattn.kernels.triton.extend_launch import ExtendStep, extend
from anyattn.kernels.triton.metadata_launch import compile_by_kernels
from anyattn.kernels.triton.mla_hopper_launch import mla_forms

__all__ = ["TritonMLA"]

_MANY = 1 << 20  # query rows of a long prefill


@dataclass(eq=False)
class _Step:
    """`Plan.private`: tiles per plan group, and what all of its layers share: how decode is dealt out, or one
    split-KV workspace.
    """

    kernel: mla.MLAStep
    tiles: dict[PlanGroup, MLATiles] = field(default_factory=dict)
    decode: dict[PlanGroup, DecodeStep] = field(default_factory=dict)
    splits: dict[PlanGroup, mla.Partials] = field(default_factory=dict)


class TritonMLA(AttentionBackend):
    """Reads latents straight from `req_to_token` (REQUEST_TABLE); new tokens are read back as stored."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool without latents."""
        super().__init__(config)
        if not isinstance(self.pool, MLAPool):
            raise PoolError(
                "triton reads latent pools here", asked=type(self.pool).__name__, allowed="MLAPool"
            )
        self._latents = self.pool
        compile_by_kernels(self.compiler, self.table, _dealt)
        self._caches: dict[int, mla.LatentCache] = {}
        self._arch, self._units = kernel_arch(self.pool.device), num_units(self.pool.device)
        self._invariant = config.deterministic is Determinism.BATCH_INVARIANT

    def traits(self, mode: ForwardMode) -> Traits:
        """Kernels read the live request table."""
        base = super().traits(mode)
        return replace(base, shared_read_ends=SharedReadEnds.POST_REPLAY, kv_read=KVRead.READ_BACK)

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Tiles, ranges or splits, and workspace: functions of shapes and bounds, never of device values."""
        step = plan.private = _Step(
            mla.MLAStep(
                self.table.req_to_token, plan.req_pool_indices, plan.seq_lens, plan.prefix_lens,
                plan.query_offsets, plan.mask_cells, plan.mask_indptr,
            )
        )  # fmt: skip
        for group, heads in self.config.groups.max_q_heads.items():
            tiles = step.tiles[group] = self._tiles(plan, group, heads)
            if plan.key.mode is ForwardMode.DECODE and not self._invariant:
                step.decode[group] = self._decode_step(plan, group, heads, tiles, in_capture)
            workspace = self._workspace(plan, group, heads, tiles)
            if workspace is not None:
                step.splits[group] = workspace

    def _tiles(self, plan: Plan, group: PlanGroup, heads: int) -> MLATiles:
        """Batch-invariant steps take those of a long prefill, whatever they are, of the portable kernel: its
        bits were compared on a chip, those of Hopper's were not.
        """
        rank, rope = group.v_head_dim, group.head_dim - group.v_head_dim
        dtype, stored = self.config.dtype, self.pool.kv_dtype
        if self._invariant:
            return choose_mla(_MANY, stored.itemsize, self._arch, decode=False)
        forms = mla_forms(self._arch, dtype, stored, rank, rope, group.logit_cap)
        decode = plan.key.mode is ForwardMode.DECODE
        return choose_mla(max(1, plan.max_q_len) * heads, stored.itemsize, self._arch, forms, decode=decode)

    def _decode_step(
        self, plan: Plan, group: PlanGroup, heads: int, tiles: MLATiles, in_capture: bool
    ) -> DecodeStep:
        """Ranges whose number depends on shapes alone: a graph serves any lengths with them."""
        table, programs = plan.tables[group.table], mla.head_blocks(heads, tiles)
        dealt = choose_mla_ranges(
            max(1, plan.key.num_requests), programs, plan.max_kv_len, tiles, self._units,
            even=_even(plan.batch, group, in_capture),
        )  # fmt: skip
        return DecodeStep.of(
            self.table.req_to_token, plan.req_pool_indices, table.kv_start, table.kv_lens, None,
            self.config.form.kernel_page, _sizes(group, heads), dealt,
        )  # fmt: skip

    def _workspace(self, plan: Plan, group: PlanGroup, heads: int, tiles: MLATiles) -> mla.Partials | None:
        """Splits of verifications; other extends have rows enough."""
        if self._invariant or plan.key.mode is not ForwardMode.TARGET_VERIFY:
            return None
        blocks = mla.extend_blocks(heads, max(1, plan.max_q_len), tiles)
        programs = max(1, plan.key.num_requests) * blocks
        splits = choose_splits(programs, plan.max_kv_len, tiles.block_n, self._units)
        return mla.mla_partials(plan.key.num_tokens, heads, group.v_head_dim, splits, self.pool.device)

    def replan(self, plan: Plan) -> None:
        """Nothing: tiles, ranges and splits are a graph's own, and lengths are read on the device."""

    def write_kv(self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """One launch for the latent and its rope part. A layer with shared KV stores nothing."""
        if layer.spec.kv_shared_with is None:
            self._cache(layer.layer_id).write(k, loc)

    def forward_decode(self, call: AttentionCall) -> None:
        """Decode of ranges; batch-invariant steps take the extend's tiles, whoever else is there."""
        method, step = call.plan.mla_method, call.plan.private
        if self._invariant or (method is not None and method.expands):
            self.forward_extend(call)
            return
        spec, dealt, work = call.layer.spec, step.decode[call.group], None
        if spec.num_q_heads != dealt.heads.num_q:
            work = pieces(call.q.shape[0], _sizes(call.group, spec.num_q_heads), dealt.tiles, call.q.device)
        mla.mla_decode(
            call.q, self._cache(call.layer.layer_id), dealt, step.tiles[call.group], spec.scale,
            spec.logit_cap, call.out, call.lse, work,
        )  # fmt: skip

    def forward_extend(self, call: AttentionCall) -> None:
        """By the plan's method."""
        method, step, spec = call.plan.mla_method, call.plan.private, call.layer.spec
        if method is not None and method.expands:
            run_materialised(call, self.pool, self._ragged)
            return
        mla.mla_extend(
            call.q, self._cache(call.layer.layer_id), step.kernel, step.tiles[call.group], spec.scale,
            spec.logit_cap, self._partials(call), call.out, call.lse,
        )  # fmt: skip

    def _partials(self, call: AttentionCall) -> mla.Partials | None:
        """The step's workspace, or one of the right size for a layer with fewer heads."""
        workspace: mla.Partials | None = call.plan.private.splits.get(call.group)
        tokens, heads, _ = call.q.shape
        if workspace is None or workspace[1].shape[:2] == (tokens, heads):
            return workspace
        return mla.mla_partials(tokens, heads, call.out.shape[2], workspace[1].shape[2], call.q.device)

    def _ragged(
        self,
        call: AttentionCall,
        k: torch.Tensor,
        v: torch.Tensor,
        part: KeyPart,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        *,
        causal: bool,
    ) -> None:
        """The dense extend over keys that are arguments, with offsets of their own."""
        spec, plan = materialised_spec(call.layer.spec), call.plan
        heads = kernels.Heads(spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
        step = ExtendStep(
            source=None,
            req_rows=plan.req_pool_indices,
            query_offsets=plan.query_offsets,
            prefix_lens=plan.prefix_lens,
            pool_lens=None,
            kv_start=None,
            key_offsets=part.offsets,
        )
        scale = self._cache(call.layer.layer_id).scale
        unread = kernels.Cache.of(k[None], v[None], "NHD", scale, scale, scaled=False)
        tiles = choose_extend(plan.max_q_len, spec.head_dim, k.dtype.itemsize, self._arch)
        variant = kernels.Variant(spec.scale, spec.logit_cap, causal=causal)
        extend(call.q, k, v, unread, step, heads, variant, tiles, out, lse)

    def _cache(self, layer_id: int) -> mla.LatentCache:
        cache = self._caches.get(layer_id)
        if cache is None:
            scale, _ = self._latents.scales(layer_id)
            rank = self._latents.specs[layer_id].v_head_dim
            cache = self._caches[layer_id] = mla.LatentCache(
                self._latents.latent_cache(layer_id),
                scale.device,
                rank,
                not scale.is_one,
                self.config.form.kernel_page,
            )
        return cache


def _sizes(group: PlanGroup, heads: int) -> kernels.Heads:
    return kernels.Heads(heads, 1, group.head_dim, group.v_head_dim)


def _dealt(plan: Plan) -> Iterable[DecodeStep]:
    """Decode steps whose ranges are filled with the plan's tables."""
    return plan.private.decode.values() if isinstance(plan.private, _Step) else ()
