"""`lumen_stream`: decode from lists of slots. It serves one phase; another backend takes the rest."""

from __future__ import annotations

import math
from dataclasses import replace

from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.contract import AttentionBackend
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.traits import SharedReadEnds, Traits
from anyattn.errors import FeatureError

__all__ = ["LumenStream"]


class LumenStream(AttentionBackend):
    """Reads a list of slots per request, which anyattn has trimmed to the window where there is one."""

    def traits(self, mode: ForwardMode) -> Traits:
        """As `LumenFlash`."""
        return replace(super().traits(mode), shared_read_ends=SharedReadEnds.IN_REPLAY)

    def forward_decode(self, call: AttentionCall) -> None:
        """One query a request over its listed slots."""
        from anyattn_lumen import driver

        assert call.table is not None
        assert isinstance(self.pool, MHAPool)
        layer, (indptr, indices) = call.layer, call.table.csr
        keys, values = self.pool.key_cache(layer.layer_id), self.pool.value_cache(layer.layer_id)
        driver.stream_decode(
            call.q, keys.view(-1, *keys.shape[2:]), values.view(-1, *values.shape[2:]), indptr, indices,
            call.out, call.lse, scale=layer.spec.scale, cap=layer.spec.logit_cap,
        )  # fmt: skip
        if call.lse is not None:
            call.lse.mul_(math.log(2.0))

    def forward_extend(self, call: AttentionCall) -> None:
        """Never reached: no row declares it, so selection gives prefill to another backend."""
        raise FeatureError(
            "lumen_stream decodes only",
            asked=call.plan.key.mode.value,
            allowed="decode",
            hint="prefill='lumen_flash'",
        )
