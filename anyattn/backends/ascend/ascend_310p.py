"""310P: ATB's paged operators over NZ caches, fp16.

Argument names and order: the operators' C++ signatures in torch-npu 2.13.0 and the calls of vllm-ascend
(folder `_310p`). Caches are `[pages, Hkv * D / 16, 128, 16]`; masks are additive, tiled like the caches and
cast to the fractal format; context lengths stand on the device, query lengths on the host. Not run on a 310P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import BackendConfig
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.layer import AttentionLayer
from anyattn.core.plan import Plan
from anyattn.errors import BackendBuildError

__all__ = ["FRACTAL_NZ", "TILE", "PagedOperators", "tiled"]

FRACTAL_NZ = 29
"""Number of the format in ACL's enumeration."""
TILE = 16
"""Rows and columns of a tile."""


def tiled(mask: torch.Tensor) -> torch.Tensor:
    """`[T, N]` as `[1, N / 16, T, 16]`, both sizes rounded up to tiles, filled with 0 (nothing hidden)."""
    rows, columns = (-(-size // TILE) * TILE for size in mask.shape)
    wide = torch.zeros(rows, columns, dtype=mask.dtype, device=mask.device)
    wide[: mask.shape[0], : mask.shape[1]] = mask
    return wide.view(1, rows, columns // TILE, TILE).permute(0, 2, 1, 3).contiguous()


@dataclass(eq=False)
class _Step:
    """`Plan.private`: rows of requests; in extends their lengths (int32, host) and the mask of all rows."""

    rows: int
    q_lens: torch.Tensor | None = None
    mask: torch.Tensor | None = None


class PagedOperators:
    """`_npu_paged_attention` for decode, `_npu_paged_attention_splitfuse` for all else, mixed steps too."""

    def __init__(self, library: Any, config: BackendConfig, pool: MHAPool) -> None:
        """Raises `BackendBuildError` for a torch-npu without these operators."""
        self.config, self.pool = config, pool
        names = ("_npu_paged_attention", "_npu_paged_attention_splitfuse", "npu_format_cast")
        missing = [name for name in names if not hasattr(library, name)]
        if missing:
            raise BackendBuildError(
                "ascend on 310P needs ATB's operators",
                asked=", ".join(missing),
                allowed="torch-npu 2.10 or later with the NNAL package",
                hint="source the set_env.sh of NNAL",
            )
        self._decode, self._extend, self._cast = (getattr(library, name) for name in names)
        self._caches: dict[int, tuple[AttentionLayer, torch.Tensor, torch.Tensor]] = {}

    def plan(self, plan: Plan, *, in_capture: bool) -> _Step:
        """Host half of a step: nothing but the mask of extends, which all layers share."""
        del in_capture  # rows for this chip declare no graphs
        lens = plan.host_extend_lens or []
        if plan.key.mode is ForwardMode.DECODE:
            return _Step(plan.key.num_tokens)
        q_lens = torch.tensor(lens, dtype=torch.int32)
        return _Step(sum(lens), q_lens, self._mask(plan))

    def replan(self, plan: Plan) -> None:
        """As for an eager step."""
        plan.private = self.plan(plan, in_capture=False)

    def _mask(self, plan: Plan) -> torch.Tensor:
        """fp16, -inf where a query doesn't see a key: a row for each query, at its position."""
        seqs, lens = plan.host_seq_lens or [], plan.host_extend_lens or []
        places = [p for seq, new in zip(seqs, lens, strict=True) for p in range(seq - new, seq)]
        longest = max(seqs, default=0)
        position = torch.tensor(places, dtype=torch.int32).to(self.pool.device, non_blocking=True)
        column = torch.arange(longest, dtype=torch.int32, device=self.pool.device)
        hidden = torch.zeros(len(places), longest, dtype=torch.float16, device=self.pool.device)
        hidden.masked_fill_(column[None, :] > position[:, None], -torch.inf)
        cast: torch.Tensor = self._cast(tiled(hidden), FRACTAL_NZ)
        return cast

    def run(self, call: AttentionCall) -> None:
        """One layer; `out` is written by the operator itself."""
        step: _Step = call.plan.private
        k, v = self._cache(call.layer)
        if not step.rows:
            return
        assert call.table is not None
        rows = slice(step.rows)
        out = call.out[rows]
        made = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        common = {
            "query": call.q[rows].contiguous(), "key_cache": k, "value_cache": v,
            "num_kv_heads": call.group.num_kv_heads, "num_heads": call.q.shape[1],
            "scale_value": call.group.scale, "block_table": call.table.blocks,
            "context_lens": call.table.kv_lens, "out": made,
        }  # fmt: skip
        if step.mask is None:
            self._decode(**common)
        else:
            self._extend(mask=step.mask, seq_len=step.q_lens, **common)
        if made is not out:
            out.copy_(made)

    def _cache(self, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
        """`[pages, Hkv * D / 16, P, 16]`, views of the pool's `[pages, Hkv, D / 16, P, 16]`."""
        found = self._caches.get(layer.layer_id)
        if found is None or found[0] is not layer:
            caches = self.pool.key_cache(layer.layer_id), self.pool.value_cache(layer.layer_id)
            k, v = (c.view(c.shape[0], -1, c.shape[3], c.shape[4]) for c in caches)
            found = self._caches[layer.layer_id] = (layer, k, v)
        return found[1], found[2]
