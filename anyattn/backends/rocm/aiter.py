"""`aiter`: AMD's kernels on gfx942 and gfx950. Which of them runs is the capability row's to say.

Proven on stand-ins of both builds and by their signatures; no AMD device has run it yet.
"""

from __future__ import annotations

import importlib
from dataclasses import replace

from anyattn.backends.cuda.fused_tables import offer_filler
from anyattn.backends.rocm.aiter_kernels import KERNELS, Kernel, Step
from anyattn.backends.rocm.aiter_layers import Layer, new_layer
from anyattn.core.batch import ForwardMode
from anyattn.core.call import AttentionCall
from anyattn.core.capabilities import CapabilityRow
from anyattn.core.contract import AttentionBackend, BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.plan import Plan
from anyattn.core.traits import KVRead, SharedReadEnds, Traits
from anyattn.errors import BackendBuildError, PoolError

__all__ = ["AiterAttention"]

_LAYOUTS = ("NHD", "VECTORISED_5D")


class AiterAttention(AttentionBackend):
    """Tables of the step's own; bounds come from the host, lengths stay on the device."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for another pool, `BackendBuildError` for a build without the row's kernel."""
        importlib.import_module("aiter")
        super().__init__(config)
        if not isinstance(self.pool, MHAPool) or self.pool.layout not in _LAYOUTS:
            have = f"{type(self.pool).__name__} ({self.pool.layout})"
            raise PoolError(
                "aiter reads MHA pools", asked=have, allowed=f"MHAPool in {' or '.join(_LAYOUTS)}"
            )
        made: dict[str, Kernel] = {}
        self._kernels: dict[ForwardMode, Kernel] = {}
        for mode in ForwardMode:
            name = _kernel_name(config.row_for(mode))
            if name not in made:
                made[name] = KERNELS[name](config)
            self._kernels[mode] = made[name]
        self._layers: dict[int, Layer] = {}
        offer_filler(self.compiler, config.table)

    def traits(self, mode: ForwardMode) -> Traits:
        """Tables are copied while planning. CK reads 8-bit KV with queries rounded likewise."""
        kernel = self._kernels[mode]
        return replace(
            super().traits(mode),
            shared_read_ends=SharedReadEnds.IN_REPLAY,
            kv_read=KVRead.READ_BACK,
            strategies=kernel.strategies,
            rounds_queries=is_fp8(self.pool.kv_dtype) and isinstance(kernel, KERNELS["mha_batch_prefill"]),
        )

    def plan_private(self, plan: Plan, *, in_capture: bool) -> None:
        """Bounds, which a captured kernel keeps: they are then those of the largest batch of its shape."""
        decode, longest = plan.key.mode is ForwardMode.DECODE, max(1, plan.max_q_len)
        if in_capture and not decode:
            longest = max(2, plan.key.num_tokens)
        bound = self.config.limits.max_context if in_capture else max(1, plan.max_kv_len)
        plan.private = Step(longest, bound, clear=in_capture and not decode)
        self._kernels[plan.key.mode].plan(plan, plan.private)

    def replan(self, plan: Plan) -> None:
        """Nothing: what a graph was captured with bounds every batch of its shape."""

    def forward_decode(self, call: AttentionCall) -> None:
        """The row's kernel; nothing that a decode has differs for it."""
        self.forward_extend(call)

    def forward_extend(self, call: AttentionCall) -> None:
        """The row's kernel of this mode."""
        step: Step = call.plan.private
        if not call.q.shape[0]:
            return
        if step.clear:
            call.out.zero_()
        layer = self._layers.get(call.layer.layer_id)
        if layer is None or layer.layer is not call.layer:
            assert isinstance(self.pool, MHAPool)
            layer = new_layer(call.layer, self.pool, self.config.form.kernel_page)
            self._layers[call.layer.layer_id] = layer
        self._kernels[call.plan.key.mode].run(call, layer, step)


def _kernel_name(row: CapabilityRow) -> str:
    """First word of the row's method. Raises `BackendBuildError` for a kernel without a class."""
    name = row.method.replace(",", " ").split(" ")[0]
    if name not in KERNELS:
        raise BackendBuildError("kernel of an aiter row", asked=row.method, allowed=", ".join(KERNELS))
    return name
