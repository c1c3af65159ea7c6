"""Faults in the calls of `ascend` on 910B; shown by the stand-in of torch-npu."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_CALLS = "anyattn.backends.ascend.ascend_calls"
_FUSED = "anyattn.backends.ascend.ascend_fused:FusedInfer"
_PLANNED = f"{_FUSED}._call"
_RUN = f"{_CALLS}:FusedCall.run"
_ANY = ("decode", "extend", "mixed", "chunk")

MUTANTS = (
    Mutant(
        name="ascend: the band as the count of its keys",
        where=f"{_CALLS}:sparsity",
        old='"pre_tokens": window - 1',
        new='"pre_tokens": window',
        names=("window",),
    ),
    Mutant(
        name="ascend: query lengths plain where TND counts them up",
        where=f"{_CALLS}:cumulative",
        old="list(itertools.accumulate(lens))",
        new="list(lens)",
        names=("561002", "extend", "mixed", "chunk"),
        report="vllm-ascend#8523",
    ),
    Mutant(
        name="ascend: key lengths counted up over pages",
        where=_PLANNED,
        old="key_lengths(plan, table.host.kv_lens.tolist(), padded=0 if one_token else 1)",
        new="cumulative(key_lengths(plan, table.host.kv_lens.tolist(), padded=0 if one_token else 1))",
        names=_ANY,
    ),
    Mutant(
        name="ascend: key lengths before this step's tokens",
        where=_PLANNED,
        old="table.host.kv_lens.tolist()",
        new="[max(0, n - 1) for n in table.host.kv_lens.tolist()]",
        names=_ANY,
    ),
    Mutant(
        name="ascend: the operator's default scale",
        where=f"{_CALLS}:FusedCall.of",
        old="operator.scale: scale",
        new="operator.scale: 1.0",
        names=("scale", *_ANY),
    ),
    Mutant(
        name="ascend: as many KV heads as query heads",
        where=f"{_CALLS}:FusedCall.of",
        old='arguments["num_key_value_heads"] = num_kv_heads',
        new='arguments["num_key_value_heads"] = 0',
        names=("heads", "group", *_ANY),
    ),
    Mutant(
        name="ascend: log-sum-exp taken for one of base 2",
        where=_RUN,
        old="lse.copy_(sums.view(lse.shape))",
        new="lse.copy_(sums.view(lse.shape) * 0.6931471805599453)",
        names=("log-sum-exp", "LSE", "lse"),
    ),
    Mutant(
        name="ascend: the shared mask upside down",
        where=f"{_CALLS}:causal_mask",
        old=".triu_(1)",
        new=".tril_(-1)",
        names=_ANY,
    ),
    Mutant(
        name="ascend: causal from the first key",
        where=f"{_CALLS}:sparsity",
        old='{"sparse_mode": CAUSAL, "atten_mask": mask}',
        new='{"sparse_mode": 2, "atten_mask": mask}',
        names=("sparse_mode", "extend"),
    ),
    Mutant(
        name="ascend: sinks left out",
        where=f"{_FUSED}.run",
        old="{} if sinks is None else",
        new="{} if sinks is None or sinks.numel() else",
        names=("sinks",),
    ),
    Mutant(
        name="ascend: pages by head read as pages by token",
        where=f"{_FUSED}._known",
        old="if not self._hnd:",
        new="if self._hnd or not self._hnd:",
        names=("HND",),
    ),
    Mutant(
        name="ascend: one query a request in a form that drops the band",
        where=_PLANNED,
        old="decode and window is None and not group.sinks",
        new="decode and not group.sinks",
        names=("window",),
    ),
    Mutant(
        name="ascend: padded requests without a key under a mask",
        where=_PLANNED,
        old="padded=0 if one_token else 1",
        new="padded=0",
        names=("padding", "padded"),
    ),
    Mutant(
        name="ascend: prompts with a prefix over their own tokens alone",
        where=f"{_FUSED}._is_fresh",
        old="exact is not None and torch.equal(exact.seq_lens, exact.extend_lens)",
        new="exact is not None",
        names=("extend", "mixed", "chunk", "prefix"),
    ),
    Mutant(
        name="ascend: declares that tables are read while planning",
        where="anyattn.backends.ascend.ascend:Ascend.traits",
        old="SharedReadEnds.IN_REPLAY",
        new="SharedReadEnds.PRE_REPLAY",
        names=("shared-reads",),
    ),
)
