"""Faults in the Triton kernels and their host side; they run in Triton's interpreter."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_HOST = "anyattn.kernels.triton.attention"
_DECODE = "anyattn.kernels.triton.decode:decode_kernel"
_RANGES = "anyattn.kernels.triton.ranges"
_EXTEND = "anyattn.kernels.triton.extend"
_BACKEND = "anyattn.backends.portable.triton:TritonAttention"

MUTANTS = (
    Mutant(
        name="decode window one key too wide",
        where="anyattn.kernels.triton.decode:_stream",
        old="first_seen = length - window",
        new="first_seen = length - window - 1",
        names=("window, decode",),
        report="sglang#32087",
    ),
    Mutant(
        name="decode log-sum-exp in base 2",
        where="anyattn.kernels.triton.decode:_finish",
        old="natural = (m + tl.log2(den)) * 0.6931471805599453",
        new="natural = m + tl.log2(den)",
        names=("log-sum-exp", "merge"),
        report="flashinfer#4485",
    ),
    Mutant(
        name="sink in every split",
        where="anyattn.kernels.triton.decode:_finish",
        old="    if SPLIT:",
        new="    if HAS_SINKS and SPLIT:\n"
        "        sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32)\n"
        "        acc, natural = apply_sink(acc, natural, sink)\n"
        "    if SPLIT:",
        names=("sinks",),
    ),
    Mutant(
        name="sink dropped where splits merge",
        where="anyattn.kernels.triton.merge:merge_ranges_kernel",
        old="if HAS_SINKS:",
        new="if HAS_SINKS and num_heads < 1:",
        names=("sinks",),
    ),
    Mutant(
        name="first position of a trimmed table ignored by decode",
        where=f"{_RANGES}:listed",
        old="start = tl.load(kv_start + b, mask=live, other=0)",
        new="start = tl.load(kv_start + b, mask=live, other=0) * 0",
        names=("window",),
        report="sglang#9279",
    ),
    Mutant(
        name="one key past the last",
        where="anyattn.kernels.triton.decode:_stream",
        old="live = n + offs_n < hi",
        new="live = n + offs_n <= hi",
        names=("edge", "decode"),
    ),
    Mutant(
        name="K scale dropped by decode",
        where=_DECODE,
        old="logit_scale = scale * tl.load(k_scale + kv_head * k_scale_h)",
        new="logit_scale = scale",
        names=("scale",),
        report="vllm#55670",
    ),
    Mutant(
        name="V scale of the first head for all",
        where=_DECODE,
        old="values_scale = v_scale + kv_head * v_scale_h",
        new="values_scale = v_scale",
        names=("KV scales per head", "V scale"),
    ),
    Mutant(
        name="query heads interleaved over KV heads",
        where=_DECODE,
        old="heads = kv_head * GROUP + offs_h",
        new="heads = kv_head + offs_h * kv_heads",
        names=("shared KV heads", "decode"),
    ),
    Mutant(
        name="one program for a group wider than it",
        where=f"{_HOST}:decode_programs",
        old="-(-heads.group // ",
        new="max(1, heads.group // ",
        names=("wide group",),
    ),
    Mutant(
        name="table entries taken for longer runs than a page",
        where=f"{_HOST}:sub_page",
        old="return min(",
        new="return min(2 * ",
        names=("slots", "page", "decode"),
        report="sglang#32902",
    ),
    Mutant(
        name="a cut request's last piece forgotten",
        where=f"{_RANGES}:_range",
        old="tl.cdiv(last_end, step) - r, 0)",
        new="tl.cdiv(last_end, step) - r - 1, 0)",
        names=("merge", "decode", "edge"),
    ),
    Mutant(
        name="keys of the diagonal's tile unmasked",
        where=f"{_EXTEND}:extend_kernel",
        old="full = tl.minimum(end, prefix + t0 + 1)",
        new="full = tl.minimum(end, prefix + t0 + BLOCK_N)",
        names=("extend", "chunk"),
    ),
    Mutant(
        name="extend window by radius",
        where=f"{_EXTEND}:_seen",
        old="seen = seen & (gap < window)",
        new="seen = seen & (gap <= window)",
        names=("window",),
        report="sglang#32087",
    ),
    Mutant(
        name="extend window begins too late",
        where=f"{_EXTEND}:extend_kernel",
        old="earliest = prefix - window + 1",
        new="earliest = prefix - window + 1 + SUB",
        names=("window",),
    ),
    Mutant(
        name="own tokens read twice",
        where=f"{_BACKEND}.forward_extend",
        old="plan.prefix_lens if direct else plan.seq_lens",
        new="plan.seq_lens",
        names=("nothing stored", "scale", "KV source"),
    ),
    Mutant(
        name="declares that tables are read while planning",
        where=f"{_BACKEND}.traits",
        old="SharedReadEnds.POST_REPLAY",
        new="SharedReadEnds.IN_REPLAY",
        names=("shared-reads",),
    ),
    Mutant(
        name="lengths taken from the host",
        where=f"{_BACKEND}._decode_step",
        old="self._tiles(plan.batch, plan.max_kv_len, group",
        new="self._tiles(plan.batch, max(plan.host_seq_lens), group",
        names=("host-lengths", "stale-lengths"),
        report="sglang#8340",
    ),
)
