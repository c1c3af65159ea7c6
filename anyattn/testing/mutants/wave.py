"""Faults in the calls of `wave`; shown by the stand-in of its library."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_BACKEND = "anyattn.backends.rocm.wave:WaveAttention"
_COMPILER = "anyattn.backends.rocm.wave_kernels:Compiler"
_DECODE = f"{_BACKEND}.forward_decode"
_EXTEND = f"{_BACKEND}.forward_extend"
_TABLES = f"{_BACKEND}.init_forward_metadata_in_graph"

_COMPILED = (
    Mutant(
        name="wave: decode compiled for the scale of the head size",
        where=f"{_COMPILER}._compiled_decode",
        old="layer_scaling=shape.scale",
        new="layer_scaling=None",
        names=("softmax scale",),
    ),
    Mutant(
        name="wave: extend compiled for the scale of the head size",
        where=f"{_COMPILER}._compiled_extend",
        old="layer_scaling=shape.scale",
        new="layer_scaling=None",
        names=("softmax scale",),
    ),
    Mutant(
        name="wave: decode compiled without the cap",
        where=f"{_COMPILER}._compiled_decode",
        old="logit_cap=shape.cap",
        new="logit_cap=0.0",
        names=("logit cap, decode",),
    ),
    Mutant(
        name="wave: extend compiled without the cap",
        where=f"{_COMPILER}._compiled_extend",
        old="logit_cap=shape.cap",
        new="logit_cap=0.0",
        names=("logit cap",),
    ),
    Mutant(
        name="wave: extend compiled without the causal mask",
        where=f"{_COMPILER}._compiled_extend",
        old="is_causal=True",
        new="is_causal=False",
        names=("causal rule",),
    ),
    Mutant(
        name="wave: decode compiled for fewer splits than its partial results have",
        where=f"{_COMPILER}._compiled_decode",
        old="SPLITS,",
        new="SPLITS // 2,",
        names=("splits",),
    ),
    Mutant(
        name="wave: matrix instructions where every head has keys of its own",
        where=f"{_COMPILER}._decode_products",
        old="shape.num_q_heads != shape.num_kv_heads",
        new="shape.num_q_heads >= shape.num_kv_heads",
        names=("GenericDot",),
    ),
)

_LAUNCHED = (
    Mutant(
        name="wave: partial results of a larger batch",
        where=f"{_BACKEND}._partials",
        old="_room(group, heads, plan.key.num_requests,",
        new="_room(group, heads, plan.key.num_requests + 1,",
        names=("page edges, decode",),
    ),
    Mutant(
        name="wave: the first tile of long queries alone",
        where=_EXTEND,
        old="prefix.indices, plan.max_q_len, out,",
        new="prefix.indices, min(plan.max_q_len, 64), out,",
        names=("tile edge 128", "long-step"),
    ),
    Mutant(
        name="wave: decode's output with gaps handed over",
        where=_DECODE,
        old="dense_rows(call.out)",
        new="call.out",
        names=("strided",),
    ),
    Mutant(
        name="wave: extend's output with gaps handed over",
        where=_EXTEND,
        old="dense_rows(call.out)",
        new="call.out",
        names=("strided",),
    ),
    Mutant(
        name="wave: keys and values of the prefix swapped",
        where=_EXTEND,
        old="layer.k, layer.v, plan.query_offsets",
        new="layer.v, layer.k, plan.query_offsets",
        names=("chunked", "page edges"),
    ),
    Mutant(
        name="wave: decode's values from the cache of keys",
        where=_DECODE,
        old="layer.k, layer.v, indptr",
        new="layer.k, layer.k, indptr",
        names=("page edges, decode",),
    ),
)

_TABLED = (
    Mutant(
        name="wave: the step's own tokens in the prefix too",
        where=_TABLES,
        old="plan.prefix_lens, 1, prefix.indptr",
        new="plan.seq_lens, 1, prefix.indptr",
        names=("page edges, extend", "chunked"),
    ),
    Mutant(
        name="wave: stored tokens read from the head of the request",
        where=_TABLES,
        old="column = plan.prefix_lens[row] + token",
        new="column = token",
        names=("stored already",),
    ),
    Mutant(
        name="wave: a request's first stored token taken for the last of the one before",
        where=_TABLES,
        old="right=True",
        new="right=False",
        names=("stored already",),
    ),
    Mutant(
        name="wave: slots of padding looked up behind the last request",
        where=_TABLES,
        old=".clamp_max_(rows.shape[0] - 1)",
        new="",
        names=("padding, extend",),
    ),
    Mutant(
        name="wave: declares that tables are read while planning",
        where=f"{_BACKEND}.traits",
        old="SharedReadEnds.IN_REPLAY",
        new="SharedReadEnds.PRE_REPLAY",
        names=("shared-reads",),
    ),
)

MUTANTS = (*_COMPILED, *_LAUNCHED, *_TABLED)
