"""Faults in the calls of `hpc_ops`; shown by the stand-in of its library."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_MODULE = "anyattn.backends.cuda.hpc_ops"
_BACKEND = f"{_MODULE}:HpcOps"
_MAPS = f"{_BACKEND}.init_forward_metadata_in_graph"
_EXTEND = f"{_BACKEND}.forward_extend"
_ROUNDED = f"{_BACKEND}._rounded"

MUTANTS = (
    Mutant(
        name="hpc_ops: query tokens counted as the kernel counts them",
        where=_MAPS,
        old="num_kv_heads, 1, True)",
        new="num_kv_heads, 0, True)",
        names=("decode",),
    ),
    Mutant(
        name="hpc_ops: this step's token counted twice",
        where=_MAPS,
        old="num_kv_heads, 1, True)",
        new="num_kv_heads, 1, False)",
        names=("decode",),
    ),
    Mutant(
        name="hpc_ops: task map of the step before",
        where=_MAPS,
        old="plan.tables[group].kv_lens",
        new="plan.prefix_lens",
        names=("decode",),
        report="sglang#8340",
    ),
    Mutant(
        name="hpc_ops: lengths before this step, as documented",
        where=_EXTEND,
        old="table.kv_lens, plan.max_q_len",
        new="plan.prefix_lens, plan.max_q_len",
        names=("extend", "mixed", "chunk"),
    ),
    Mutant(
        name="hpc_ops: longest query of a decode step",
        where=_EXTEND,
        old="plan.max_q_len, output=out",
        new="1, output=out",
        names=("extend", "mixed", "chunk"),
    ),
    Mutant(
        name="hpc_ops: outputs with gaps handed over",
        where=f"{_MODULE}:_dense",
        old="return out if out.is_contiguous() else",
        new="return out if out.is_floating_point() else",
        names=("strided", "out"),
    ),
    Mutant(
        name="hpc_ops: K's scale left out",
        where=_ROUNDED,
        old="scaled = q.float() * _heads(k, q.shape[1])",
        new="scaled = q.float()",
        names=("scale",),
        report="vllm#55670",
    ),
    Mutant(
        name="hpc_ops: V's scale left out",
        where=_ROUNDED,
        old="one if _differs(v) else v.device[:1]",
        new="one",
        names=("scale",),
    ),
    Mutant(
        name="hpc_ops: scales of queries by token of the step",
        where=f"{_MODULE}:_by_request",
        old="(token - plan.query_offsets[row]).clamp_max(width - 1)",
        new="token.clamp_max(width - 1)",
        names=("extend", "mixed", "scale"),
    ),
    Mutant(
        name="hpc_ops: declares that tables are read while planning",
        where=f"{_BACKEND}.traits",
        old="SharedReadEnds.IN_REPLAY",
        new="SharedReadEnds.PRE_REPLAY",
        names=("shared-reads",),
    ),
)
