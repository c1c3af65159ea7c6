"""Faults in the calls of `aiter` on latents; shown by the stand-in of its library."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_MODULE = "anyattn.backends.rocm.aiter_mla"
_BACKEND = f"{_MODULE}:AiterMLA"
_FORWARD = f"{_BACKEND}.forward_extend"
_RAGGED = f"{_BACKEND}._ragged"

_ABSORBED = (
    Mutant(
        name="aiter: scale of absorbed heads",
        where=_FORWARD,
        old='"sm_scale": call.layer.spec.scale',
        new='"sm_scale": None',
        names=("scale",),
    ),
    Mutant(
        name="aiter: pages for tokens in the table",
        where=_FORWARD,
        old='"kv_indices": indices',
        new='"kv_indices": (indices // 64).int()',
        names=("decode",),
        report="sglang#25556",
    ),
    Mutant(
        name="aiter: offsets that count prefixes alone",
        where=_FORWARD,
        old='"kv_indptr": indptr',
        new='"kv_indptr": indptr - torch.arange(indptr.shape[0], dtype=torch.int32)',
        names=("decode",),
    ),
    Mutant(
        name="aiter: one query a request where drafts are verified",
        where=_FORWARD,
        old='"max_seqlen_q": step.longest',
        new='"max_seqlen_q": 1',
        names=("chain",),
    ),
    Mutant(
        name="aiter: few heads handed over as they are",
        where=f"{_MODULE}:_padded",
        old="return max(heads, _LEAST_HEADS)",
        new="return heads",
        names=("few heads",),
    ),
    Mutant(
        name="aiter: outputs of the heads that were added",
        where=_FORWARD,
        old="out[:, : call.out.shape[1]]",
        new="out[:, -call.out.shape[1] :]",
        names=("few heads",),
    ),
    Mutant(
        name="aiter: scale of fp8 latents left out",
        where=_FORWARD,
        old='"kv_scale": self.pool.scales(layer_id)[0].device',
        new='"kv_scale": self._one',
        names=("fp8",),
        report="vllm#55670",
    ),
    Mutant(
        name="aiter: scale of fp8 latents for queries as well",
        where=_FORWARD,
        old='"q_scale": self._one',
        new='"q_scale": self.pool.scales(layer_id)[0].device',
        names=("fp8",),
    ),
    Mutant(
        name="aiter: scales of fp8 latents not given",
        where=_FORWARD,
        old="**scales)",
        new=")",
        names=("kv_scale",),
    ),
    Mutant(
        name="aiter: declares that queries of fp8 latents aren't rounded",
        where=f"{_BACKEND}.traits",
        old="rounds_queries=self._latents.fp8",
        new="rounds_queries=False",
        names=("fp8",),
    ),
)

_MATERIALISED = (
    Mutant(
        name="aiter: prompts see what is behind them",
        where=_RAGGED,
        old="causal=causal",
        new="causal=False",
        names=("prefill, expanded",),
    ),
    Mutant(
        name="aiter: the prefix under the causal mask",
        where=_RAGGED,
        old="causal=causal",
        new="causal=True",
        names=("prefill, expanded",),
    ),
    Mutant(
        name="aiter: log-sum-exp of parts taken for base 2",
        where=_RAGGED,
        old="rest[0].t()",
        new="rest[0].t() * 0.6931471805599453",
        names=("prefill, expanded",),
        report="flashinfer#4485",
    ),
    Mutant(
        name="aiter: log-sum-exp by heads read as by tokens",
        where=_RAGGED,
        old="rest[0].t()",
        new="rest[0].reshape(lse.shape)",
        names=("prefill, expanded",),
        report="sglang#40903",
    ),
    Mutant(
        name="aiter: keys counted by queries",
        where=_RAGGED,
        old="cu_seqlens_k=part.offsets",
        new="cu_seqlens_k=plan.query_offsets",
        names=("prefill, expanded",),
    ),
    Mutant(
        name="aiter: scale of expanded heads left to the kernel",
        where=_RAGGED,
        old="softmax_scale=spec.scale",
        new="softmax_scale=None",
        names=("prefill, expanded",),
    ),
)

MUTANTS = (*_ABSORBED, *_MATERIALISED)
