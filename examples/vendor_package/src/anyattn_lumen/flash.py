"""`lumen_flash`: the driver's paged attention. The whole adapter: tables and checks are anyattn's work."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.traits import SharedReadEnds, Traits

__all__ = ["LumenFlash"]

_NATURAL = math.log(2.0)


class LumenFlash(AttentionBackend):
    """Reads a block table of pages of 16 and lengths on the device."""

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables and lengths are copies of the step's own: the scheduler may go on once they are filled."""
        return replace(super().traits(mode), shared_read_ends=SharedReadEnds.IN_REPLAY)

    def forward_decode(self, call: AttentionCall) -> None:
        """The same kernel with one query a request."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """Causal, over what the pool holds: this step's keys have been written to it."""
        from anyattn_lumen import driver

        assert call.table is not None
        keys, values = self._caches(call.layer.layer_id)
        driver.paged_attention(
            call.q, keys, values, call.plan.query_offsets, call.table.blocks, call.table.kv_lens,
            call.out, call.lse, scale=call.layer.spec.scale,
        )  # fmt: skip
        if call.lse is not None:
            call.lse.mul_(_NATURAL)  # anyattn's LSE is natural

    def _caches(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool in pages of the kernel: the pool's own page is a multiple of it."""
        assert isinstance(self.pool, MHAPool)
        keys, values = self.pool.key_cache(layer_id), self.pool.value_cache(layer_id)
        page = self.config.form.kernel_page
        return keys.view(-1, page, *keys.shape[2:]), values.view(-1, page, *values.shape[2:])
