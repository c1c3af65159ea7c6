"""Faults in the calls of `flashinfer`; shown by the stand-in of its library."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_ADAPTER = "anyattn.backends.cuda.flashinfer"
_RUN = f"{_ADAPTER}:FlashInfer._over_table"
_PLAN = "anyattn.backends.cuda.flashinfer_plan"
_STEP = "anyattn.backends.cuda.flashinfer_step"
_NATIVE = "anyattn.backends.cuda.flashinfer_native"
_LEASE = "anyattn.backends.cuda.flashinfer_lease"

MUTANTS = (
    Mutant(
        name="flashinfer: window for keys to the left",
        where=f"{_PLAN}:window_left",
        old="window - 1",
        new="window",
        names=("window",),
        report="sglang#32087",
    ),
    Mutant(
        name="flashinfer: lengths for offsets of queries",
        where=f"{_PLAN}:HostArrays.qo_indptr",
        old="torch.cumsum(exact.extend_lens, 0, dtype=torch.int32, out=indptr[1:])",
        new="indptr[1:] = exact.extend_lens.to(torch.int32)",
        names=("extend", "mixed", "verify"),
    ),
    Mutant(
        name="flashinfer: tokens in the last page counted from 0",
        where=f"{_PLAN}:PageArrays.last",
        old="(counts - (counts > 0)) * self._page",
        new="counts * self._page",
        names=("mask", "tree"),
    ),
    Mutant(
        name="flashinfer: cumulative lengths for plain ones",
        where=f"{_PLAN}:PageArrays.__init__",
        old="torch.from_numpy(self._tokens)",
        new='torch.from_numpy(self._tokens.cumsum(dtype="int32"))',
        names=("extend", "mixed", "verify", "chunk"),
    ),
    Mutant(
        name="flashinfer: HND storage called NHD",
        where=f"{_LEASE}:Wrappers.__init__",
        old="library, layout, workspace",
        new='library, "NHD", workspace',
        names=("HND", "layout"),
    ),
    Mutant(
        name="flashinfer: log-sum-exp left in base 2 by decode",
        where=f"{_ADAPTER}:FlashInfer.forward_decode",
        old="lse.mul_(_LN2)",
        new="lse.mul_(1.0)",
        names=("log-sum-exp",),
        report="flashinfer#4485",
    ),
    Mutant(
        name="flashinfer: states merged in base e",
        where=f"{_ADAPTER}:FlashInfer._merge",
        old="self._library.merge_state_in_place(out, lse, before, weight)",
        new="self._library.merge_state_in_place(out, lse.mul_(_LN2), before, weight.mul_(_LN2))",
        names=("a prefix", "chunk", "extend"),
        report="flashinfer#2113",
    ),
    Mutant(
        name="flashinfer: causal flag left out over pages",
        where=f"{_STEP}:StepPlanner._paged",
        old="causal=causal,",
        new="causal=False,",
        names=("extend", "mixed", "verify", "chunk"),
    ),
    Mutant(
        name="flashinfer: cached part of a step causal too",
        where=f"{_STEP}:StepPlanner.slot",
        old="causal=causal and own is None",
        new="causal=causal",
        names=("a prefix", "chunk", "extend"),
        host="cuda:sm120",
    ),
    Mutant(
        name="flashinfer: two-sided layers causal",
        where=f"{_STEP}:StepPlanner.slot",
        old="causal = kind is AttentionKind.CAUSAL",
        new="causal = True",
        names=("bidirectional",),
        report="sglang#33603",
    ),
    Mutant(
        name="flashinfer: default scale",
        where=f"{_STEP}:Setup.options",
        old='"sm_scale": group.scale,',
        new='"sm_scale": None,',
        names=("scale",),
    ),
    Mutant(
        name="flashinfer: K scale applied twice",
        where=_RUN,
        old="k_scale=layer.k_scale,",
        new="k_scale=None if layer.k_scale is None else layer.k_scale**2,",
        names=("scale",),
        report="sglang#18882",
    ),
    Mutant(
        name="flashinfer: V scale dropped",
        where=_RUN,
        old="v_scale=layer.v_scale,",
        new="v_scale=None,",
        names=("scale",),
        report="vllm#55670",
    ),
    Mutant(
        name="flashinfer: logit cap dropped",
        where=f"{_STEP}:Setup.options",
        old='"logits_soft_cap": group.logit_cap,',
        new='"logits_soft_cap": None,',
        names=("logit cap", "cap"),
    ),
    Mutant(
        name="flashinfer: slots for pages",
        where=f"{_STEP}:StepPlanner._pages",
        old="else table.indices",
        new="else table.indices * table.form.kernel_page",
        names=("decode", "page"),
        report="sglang#32902",
    ),
    Mutant(
        name="flashinfer: sinks handed to a wrapper that drops them",
        where=f"{_STEP}:StepPlanner._paged_kind",
        old="if not group.sinks:",
        new="if True:",
        names=("sinks",),
        report="vllm#52148",
    ),
    Mutant(
        name="flashinfer: a wrapper lent to two living plans",
        where=f"{_LEASE}:Wrappers.take",
        old="if free:\n        return free.pop()\n",
        new="if not free:\n        free = self._free[kind, slot] = [self._make(kind, {})]\n"
        "    return free[0]\n",
        names=("several-plans", "layers"),
    ),
    Mutant(
        name="flashinfer: planned again for the lengths before",
        where=f"{_NATIVE}:DecodeAgain.plan",
        old="space.stamp == stamp and ",
        new="",
        names=("several-plans", "steps", "decode"),
    ),
    Mutant(
        name="flashinfer: planned again for another batch size",
        where=f"{_NATIVE}:DecodeAgain.prepared",
        old="known is None or known.shape != shape",
        new="known is None",
        names=("several-plans", "steps", "decode"),
    ),
    Mutant(
        name="flashinfer: packed masks at offsets of bytes",
        where="anyattn.core.metadata.packed_masks:pack_mask",
        old="byte = (offsets[request] + index // 8)",
        new="byte = (offsets[request] // 8 + index // 8)",
        names=("mask", "tree"),
    ),
    Mutant(
        name="flashinfer: rows of the mask as wide as the first request's",
        where="anyattn.core.metadata.packed_masks:pack_mask",
        old="row * plan.seq_lens[request] + key",
        new="row * plan.seq_lens[0] + key",
        names=("mask", "tree"),
        report="sglang#22679",
    ),
    Mutant(
        name="flashinfer: padding handed to a prefill plan",
        where=f"{_ADAPTER}:FlashInfer.forward_extend",
        old="q, out, lse = call.q[:num], call.out[:num],",
        new="q, out, lse = call.q, call.out,",
        names=("padding",),
    ),
    Mutant(
        name="flashinfer: queries of any alignment",
        where="anyattn.core.rows:aligned",
        old="        if step % unit:",
        new="        if False:",
        names=("strided",),
    ),
)
