"""`hpc_ops`: Tencent's kernels for SM90, head size 128, groups of 4 and 8 query heads.

Written for commit 6e2eced of hpc-ops, whose version says nothing: functions are told by their signatures.
Proven by emulation alone: the library is built from source, and has not been run here.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.backends.cuda.fused_writes import FusedWrites
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.groups import TableGroup
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.scales import KVScale
from anyattn.core.plan import Plan
from anyattn.core.rows import dense
from anyattn.core.traits import KVRead, SharedReadEnds, Traits
from anyattn.errors import BackendBuildError, PoolError

__all__ = ["HpcOps"]

_MOST_REQUESTS = 2048
"""Requests that one task map can hold."""
_E4M3 = torch.float8_e4m3fn
_LEAST = 1e-20
"""Largest entry of a query row below which it counts as zero."""
_ROW_BLOCK = 128
"""Prefill's scales of queries are padded to multiples of this many rows a request."""

_MapKey = tuple[TableGroup, int]


@dataclass(eq=False)
class _Step:
    """`Plan.private`: task maps by table and KV head count. `maps` are the plan's own while it is alive."""

    maps: dict[_MapKey, torch.Tensor] = field(default_factory=dict)


class HpcOps(FusedWrites):
    """Decode by a task map (split KV by the lengths of the step), prefill over pages.

    A map holds the lengths of one step: each plan that is alive has maps of its own.
    """

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool that isn't NHD or HND, `BackendBuildError` for another library."""
        self._library = importlib.import_module("hpc")
        super().__init__(config)
        pool = self.pool
        if not isinstance(pool, MHAPool) or pool.layout not in ("NHD", "HND"):
            have = f"{type(pool).__name__} ({pool.layout})"
            raise PoolError("hpc_ops reads MHA pools", asked=have, allowed="MHAPool in NHD or HND")
        if config.limits.max_requests > _MOST_REQUESTS:
            raise BackendBuildError(
                "more requests in a step than a task map of hpc-ops holds",
                asked=config.limits.max_requests,
                allowed=f"<= {_MOST_REQUESTS}",
                hint="select(limits=Limits(max_requests=...)), or another decode backend",
            )
        self._fp8 = is_fp8(pool.kv_dtype)
        kind = "fp8" if self._fp8 else "bf16"
        self._decode = _function(self._library, f"attention_decode_{kind}", "task_map")
        self._prefill = _function(self._library, f"attention_with_kvcache_prefill_{kind}", "output")
        self._assign = _function(self._library, "assign_attention_decode_task", "mtp")
        self._workspace = _function(self._library, "get_attention_decode_task_workspace", "max_seqlen")
        self._keys = {(g.table, g.num_kv_heads): None for g in config.groups.plan_groups}
        self._free: dict[_MapKey, list[torch.Tensor]] = {key: [] for key in self._keys}
        self._captured: dict[tuple[_MapKey, int], torch.Tensor] = {}
        offer_filler(self.compiler, config.table)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables and lengths are copied while planning; 8-bit KV means 8-bit queries."""
        return replace(
            super().traits(mode),
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            kv_read=KVRead.READ_BACK,
            rounds_queries=self._fp8,
        )

    # -- planning ------------------------------------------------------------------------------------

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """A task map for each table and KV head count; the device fills it with the tables."""
        plan.private = step = _Step()
        if plan.key.mode is not ForwardMode.DECODE:
            return
        for key in self._keys:
            step.maps[key] = self._map(key, plan, in_capture=in_capture)

    def _map(self, key: _MapKey, plan: Plan, *, in_capture: bool) -> torch.Tensor:
        """The map that a graph of this size was captured with, or one that is free."""
        name = (key, plan.key.num_requests)
        held = self._captured.get(name) if plan.stable else None
        if held is not None:
            return held
        made = self._free[key].pop() if self._free[key] else self._new_map(key[1])
        if in_capture:
            self._captured[name] = made
        else:
            weakref.finalize(plan, self._free[key].append, made).atexit = False
        return made

    def _new_map(self, num_kv_heads: int) -> torch.Tensor:
        """Sized once by the limits. The library allocates on the current device."""
        limits = self.config.limits
        made: torch.Tensor = self._workspace(limits.max_requests + 1, limits.max_context, num_kv_heads)
        return made.to(self.pool.device)

    def init_forward_metadata_in_graph(self, plan: Plan) -> None:
        """Tables, then the task maps from their lengths: every replay plans anew on the device."""
        super().init_forward_metadata_in_graph(plan)
        if plan.private is None:
            return
        for (group, num_kv_heads), task_map in plan.private.maps.items():
            # Here `mtp` counts query tokens of a request; the kernel's own argument counts one less.
            self._assign(plan.tables[group].kv_lens, task_map, num_kv_heads, 1, True)

    # -- compute -------------------------------------------------------------------------------------

    def forward_decode(self, call: AttentionCall) -> None:
        """One query a request: `new_kv_included`, since lengths count it and it is stored already."""
        table, cache = self._inputs(call)
        out = _dense(call.out)
        task_map = call.plan.private.maps.get((call.group.table, call.group.num_kv_heads))
        q, scales = self._rounded(call, None)
        self._decode(
            q, *cache, table.blocks, table.kv_lens, *scales, mtp=0, new_kv_included=True, splitk=True,
            task_map=task_map, output=out,
        )  # fmt: skip
        self._finish(call, out)

    def forward_extend(self, call: AttentionCall) -> None:
        """`seqlens_kvcache` are whole lengths, this step's tokens included, which stand in the pool."""
        plan = call.plan
        if plan.max_q_len == 0:
            return
        table, cache = self._inputs(call)
        out = _dense(call.out)
        q, scales = self._rounded(call, plan)
        self._prefill(
            q, *cache, *scales, plan.query_offsets, table.blocks, table.kv_lens, plan.max_q_len, output=out
        )
        self._finish(call, out)

    def _inputs(self, call: AttentionCall) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
        """The table, and K and V as `[pages, P, Hkv, 128]`, strided where the pool is HND."""
        pool = self.pool
        assert isinstance(pool, MHAPool)
        assert call.table is not None
        k, v = pool.caches(call.layer.layer_id)
        return call.table, (k, v)

    def _rounded(
        self, call: AttentionCall, plan: Plan | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """`(q, (qscale, kscale, vscale))` for 8-bit KV, `(q, ())` else. A plan: scales in prefill's form."""
        q = dense(call.q)
        if not self._fp8:
            return q, ()
        k, v = self.pool.scales(call.layer.layer_id)
        # The kernel has one scale for K and one for V: q takes K's, out V's where heads differ.
        scaled = q.float() * _heads(k, q.shape[1])
        most = torch.finfo(_E4M3).max
        # Powers of two: the rounding is that of the query itself, wherever its row's largest entry lies.
        scale = (scaled.abs().amax(-1).clamp_min(_LEAST) / most).log2().ceil().exp2()
        rounded = (scaled / scale[..., None]).clamp(-most, most).to(_E4M3)
        one = torch.ones_like(v.device[:1])
        by_row = scale if plan is None else _by_request(scale, plan)
        return rounded, (by_row, one, one if _differs(v) else v.device[:1])

    def _finish(self, call: AttentionCall, made: torch.Tensor) -> None:
        v = self.pool.scales(call.layer.layer_id)[1]
        if self._fp8 and _differs(v):
            made.mul_(_heads(v, made.shape[1]))
        if made is not call.out:
            call.out.copy_(made)


def _differs(scale: KVScale) -> bool:
    return len(set(scale.host)) > 1


def _heads(scale: KVScale, num_q_heads: int) -> torch.Tensor:
    """`[1, Hq, 1]`."""
    return scale.device.repeat_interleave(num_q_heads // scale.device.shape[0])[None, :, None]


def _by_request(scale: torch.Tensor, plan: Plan) -> torch.Tensor:
    """`[T, Hq]` as `[B, Hq, pad]`: row of the request last, as prefill reads it."""
    width = -(-plan.max_q_len // _ROW_BLOCK) * _ROW_BLOCK
    token = torch.arange(scale.shape[0], device=scale.device, dtype=torch.int32)
    row = torch.searchsorted(plan.query_offsets[1:], token, right=True)
    out = torch.zeros(plan.key.num_requests + 1, width, scale.shape[1], device=scale.device)
    # Tokens behind the last request go to a row of their own.
    out[row, (token - plan.query_offsets[row]).clamp_max(width - 1)] = scale
    return out[:-1].transpose(1, 2).contiguous()


def _dense(out: torch.Tensor) -> torch.Tensor:
    """`out`, or memory without gaps: with a task map the kernel ignores strides."""
    return out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _function(library: Any, name: str, argument: str) -> Any:
    """A function with that argument. A submodule that failed to import leaves its functions out."""
    found = getattr(library, name, None)
    if found is None or argument not in inspect.signature(found).parameters:
        raise BackendBuildError(
            f"hpc has no {name} with {argument}",
            asked=getattr(library, "__version__", "unknown version"),
            allowed="hpc-ops of commit 6e2eced or later",
            hint="build it from source (make wheel) for SM90a with CUDA 12.8 or later",
        )
    return found
