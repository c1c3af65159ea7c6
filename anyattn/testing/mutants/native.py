"""Faults in `torch_native`'s own code and in the arithmetic of states and scales."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_ATTEND = "anyattn.backends.reference.attend"
_NATIVE = "anyattn.backends.reference.torch_native"
_STATE = "anyattn.core.state:AttentionState"

MUTANTS = (
    Mutant(
        name="window one key too wide",
        where=f"{_ATTEND}:visible",
        old="inside = gap < window",
        new="inside = gap <= window",
        names=("window",),
        report="sglang#32087",
    ),
    Mutant(
        name="window ignored",
        where=f"{_ATTEND}:visible",
        old="window = spec.sliding_window",
        new="window = None",
        names=("window",),
        report="sglang#26516",
    ),
    Mutant(
        name="bidirectional window on one side only",
        where=f"{_ATTEND}:visible",
        old="inside &= gap > -window",
        new="pass",
        names=("bidirectional window", "encoder-only window", "without the window"),
        report="sglang#33603",
    ),
    Mutant(
        name="causal rule dropped",
        where=f"{_ATTEND}:visible",
        old="seen = gap >= 0",
        new="seen = gap >= -1",
        names=("causal",),
    ),
    Mutant(
        name="log-sum-exp in base 2",
        where=f"{_ATTEND}:_explicit",
        old="lse.copy_(natural)",
        new="lse.copy_(natural / 0.6931471805599453)",
        names=("log-sum-exp",),
        report="sglang#40903",
    ),
    Mutant(
        name="log-sum-exp without the sink",
        where=f"{_ATTEND}:_explicit",
        old="natural = torch.logaddexp(natural, sinks.expand_as(natural))",
        new="natural = natural + 0",
        names=("sinks",),
    ),
    Mutant(
        name="sink dropped",
        where=f"{_NATIVE}:TorchNative.forward_extend",
        old="sinks = None if call.layer.sinks is None else call.layer.sinks.float()",
        new="sinks = None",
        names=("sinks",),
        report="sglang#34463",
    ),
    Mutant(
        name="sink counted twice after a merge",
        where=f"{_STATE}.finalise",
        old="sink = sinks.float()[None, :]",
        new="sink = sinks.float()[None, :] + 0.6931471805599453",
        names=("sinks-once",),
    ),
    Mutant(
        name="states merged in base 2",
        where=f"{_STATE}.merge",
        old="a = torch.exp(self.lse - safe)",
        new="a = torch.exp2(self.lse - safe)",
        names=("merge",),
        report="flashinfer#2113",
    ),
    Mutant(
        name="logit cap dropped",
        where=f"{_ATTEND}:_explicit",
        old="scores.div_(spec.logit_cap).tanh_().mul_(spec.logit_cap)",
        new="pass",
        names=("logit cap",),
    ),
    Mutant(
        name="cap applied after the mask",
        where=f"{_ATTEND}:_explicit",
        old="scores.masked_fill_(~seen.repeat(spec.group_size, 1), -torch.inf)",
        new="scores.masked_fill_(~seen.repeat(spec.group_size, 1), -(spec.logit_cap or torch.inf))",
        names=("logit cap",),
    ),
    Mutant(
        name="rows that see nothing become NaN",
        where=f"{_ATTEND}:_explicit",
        old="safe = torch.where(torch.isneginf(total), torch.zeros_like(total), total)",
        new="safe = total",
        names=("see nothing", "without the mask"),
    ),
    Mutant(
        name="query heads of a group mixed up",
        where=f"{_ATTEND}:_fold",
        old="return q.view(length, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)",
        new="return q.view(length, heads // kv_heads, kv_heads, dim).permute(2, 1, 0, 3)",
        names=("shared KV heads",),
    ),
    Mutant(
        name="KV scale applied twice",
        where=f"{_NATIVE}:TorchNative._keys",
        old="return dequantize(k, k_scale), dequantize(v, v_scale), own",
        new="return dequantize(dequantize(k, k_scale), k_scale), dequantize(v, v_scale), own",
        names=("scale",),
        report="sglang#18882",
    ),
    Mutant(
        name="KV scale of nothing stored",
        where=f"{_NATIVE}:TorchNative._keys",
        old="own = (call.k.float(), call.v.float())",
        new="own = (call.k.float() * self.pool.scales(call.layer.layer_id)[0].column(), call.v.float())",
        names=("scales, nothing stored", "K scale"),
        report="sglang#18396",
    ),
    Mutant(
        name="first position of a trimmed table ignored",
        where=f"{_NATIVE}:_mask",
        old="torch.arange(rows.start, rows.prefix, device=q_pos.device)",
        new="torch.arange(rows.prefix - rows.start, device=q_pos.device)",
        names=("window",),
        report="sglang#9279",
    ),
    Mutant(
        name="mask stride of the trimmed table",
        where=f"{_NATIVE}:_mask",
        old="columns = drafts if tree else rows.prefix + drafts",
        new="columns = drafts if tree else rows.prefix - rows.start + drafts",
        names=("window", "mask"),
        report="sglang#22679",
    ),
    Mutant(
        name="positions of a tree ignored",
        where=f"{_NATIVE}:_mask",
        old="device=q_pos.device), q_pos))",
        new="device=q_pos.device), rows.prefix + torch.arange(q_pos.shape[0])))",
        names=("tree",),
    ),
    Mutant(
        name="tokens of a chunk not counted as cached",
        where=f"{_NATIVE}:_row_ranges",
        old="kv = q if indptr is None else slice(indptr[i], indptr[i + 1])",
        new="kv = q if indptr is None else slice(indptr[i] + (ext > 1 and seq > ext), indptr[i + 1])",
        names=("chunk", "a prefix"),
    ),
    Mutant(
        name="declares that tables are read before planning ends",
        where=f"{_NATIVE}:TorchNative.traits",
        old="SharedReadEnds.IN_REPLAY",
        new="SharedReadEnds.PRE_REPLAY",
        names=("shared-reads",),
    ),
    Mutant(
        name="other bits each time",
        where=f"{_ATTEND}:_explicit",
        old="out.copy_(value)",
        new="out.copy_(value * (1 + 1e-6 * torch.rand(value.shape[0], 1, 1)))",
        names=("run-to-run",),
    ),
)
