"""Faults in the calls of `fa3` and `fa4`; shown by the stand-ins of their libraries."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["FA3", "FA4"]

_ADAPTER = "anyattn.backends.cuda.flash_attention:FlashAttention"
_PLAN = "anyattn.backends.cuda.flash_plan"
_CALL = f"{_PLAN}:FlashPlanner._call"
_RUN = "anyattn.backends.cuda.flash_providers:FlashFunction.run"

FA3 = (
    Mutant(
        name="fa3: window for radius",
        where=f"{_PLAN}:_window",
        old="return size - 1, 0 if causal else size - 1",
        new="return size, 0 if causal else size",
        names=("window",),
        report="sglang#32087",
    ),
    Mutant(
        name="fa3: bidirectional window on one side only",
        where=f"{_PLAN}:_window",
        old="0 if causal else size - 1",
        new="0",
        names=("bidirectional window", "encoder-only window", "without the window"),
        report="sglang#33603",
    ),
    Mutant(
        name="fa3: causal flag left out",
        where=_CALL,
        old='"causal": causal,',
        new='"causal": False,',
        names=("extend", "mixed", "verify", "causal"),
    ),
    Mutant(
        name="fa3: lengths without this step's tokens",
        where=_CALL,
        old="used=table.kv_lens,",
        new="used=plan.prefix_lens,",
        names=("decode", "extend", "verify"),
        report="sglang#8340",
    ),
    Mutant(
        name="fa3: longest query of a decode step for all",
        where=f"{_PLAN}:FlashPlanner.longest_query",
        old="return max(1, longest)",
        new="return 1",
        names=("extend", "mixed", "verify"),
    ),
    Mutant(
        name="fa3: default scale",
        where=_CALL,
        old='"scale": group.scale,',
        new='"scale": None,',
        names=("scale",),
    ),
    Mutant(
        name="fa3: log-sum-exp by heads read as by tokens",
        where=_RUN,
        old='raw if self.version == 4 and "qv" in given else raw.t()',
        new="raw.reshape(lse.shape)",
        names=("log-sum-exp", "LSE", "lse"),
        report="sglang#40903",
    ),
    Mutant(
        name="fa3: log-sum-exp taken for base 2",
        where=_RUN,
        old='raw if self.version == 4 and "qv" in given else raw.t()',
        new="0.6931471805599453 * raw.t()",
        names=("log-sum-exp", "LSE", "lse"),
        report="flashinfer#4485",
    ),
    Mutant(
        name="fa3: sinks left out",
        where=f"{_ADAPTER}.forward_extend",
        old="if sinks is not None and lse is None:",
        new="if False:",
        names=("sinks",),
        report="sglang#34463",
    ),
    Mutant(
        name="fa3: log-sum-exp without the sink",
        where="anyattn.backends.cuda.flash_attention:_finish",
        old="lse.copy_(state.lse)",
        new="pass",
        names=("sinks",),
    ),
    Mutant(
        name="fa3: caches taken for pages of one token",
        where=f"{_ADAPTER}._known",
        old="self.config.form.kernel_page",
        new="1",
        names=("page", "decode", "extend"),
    ),
    Mutant(
        name="fa3: V read with K's scale",
        where=f"{_ADAPTER}.descales",
        old='zip(("k_descale", "v_descale"), self.pool.scales(call.layer.layer_id), strict=True)',
        new='zip(("k_descale", "v_descale"), [self.pool.scales(call.layer.layer_id)[0]] * 2, strict=True)',
        names=("scale",),
        report="vllm#55670",
    ),
    Mutant(
        name="fa3: cached keys forgotten",
        where=f"{_PLAN}:FlashPlanner._is_fresh",
        old="return own and torch.equal(exact.seq_lens, exact.extend_lens)",
        new="return own",
        names=("prefix", "chunk", "extend"),
    ),
    Mutant(
        name="fa3: tile schedule of the first step kept",
        where=f"{_PLAN}:FlashPlanner.fill",
        old="made = call.plan()",
        new="made = self.__dict__.setdefault(str(call.causal), call.plan())",
        names=("step", "decode", "lengths"),
    ),
    Mutant(
        name="fa3: tile schedule of another width",
        where=f"{_PLAN}:FlashPlanner._schedule",
        old="max_k=_widest(table),",
        new="max_k=1,",
        names=("window",),
    ),
    Mutant(
        name="fa3: declares that tables are read while planning",
        where=f"{_ADAPTER}.traits",
        old="SharedReadEnds.IN_REPLAY",
        new="SharedReadEnds.PRE_REPLAY",
        names=("shared-reads",),
    ),
)

FA4 = (
    Mutant(
        name="fa4: window for radius",
        where=f"{_PLAN}:_window",
        old="return size - 1, 0 if causal else size - 1",
        new="return size, 0 if causal else size",
        names=("window",),
        report="sglang#32087",
    ),
    Mutant(
        name="fa4: causal flag left out",
        where=_CALL,
        old='"causal": causal,',
        new='"causal": False,',
        names=("extend", "mixed", "verify", "causal"),
    ),
    Mutant(
        name="fa4: lengths without this step's tokens",
        where=_CALL,
        old="used=table.kv_lens,",
        new="used=plan.prefix_lens,",
        names=("decode", "extend", "verify"),
        report="sglang#8340",
    ),
    Mutant(
        name="fa4: logit cap left out",
        where=_CALL,
        old='"cap": group.logit_cap,',
        new='"cap": None,',
        names=("logit cap",),
    ),
    Mutant(
        name="fa4: default scale",
        where=_CALL,
        old='"scale": group.scale,',
        new='"scale": None,',
        names=("scale",),
    ),
    Mutant(
        name="fa4: longest query of a decode step for all",
        where=f"{_PLAN}:FlashPlanner.longest_query",
        old="return max(1, longest)",
        new="return 1",
        names=("extend", "mixed", "verify"),
    ),
    Mutant(
        name="fa4: log-sum-exp by heads read as by tokens",
        where=_RUN,
        old='raw if self.version == 4 and "qv" in given else raw.t()',
        new="raw.reshape(lse.shape)",
        names=("log-sum-exp", "LSE", "lse"),
        report="sglang#40903",
    ),
    Mutant(
        name="fa4: sinks left out",
        where=f"{_ADAPTER}.forward_extend",
        old="if sinks is not None and lse is None:",
        new="if False:",
        names=("sinks",),
        report="sglang#34463",
    ),
    Mutant(
        name="fa4: log-sum-exp without the sink",
        where="anyattn.backends.cuda.flash_attention:_finish",
        old="lse.copy_(state.lse)",
        new="pass",
        names=("sinks",),
    ),
    Mutant(
        name="fa4: cached keys forgotten",
        where=f"{_PLAN}:FlashPlanner._is_fresh",
        old="return own and torch.equal(exact.seq_lens, exact.extend_lens)",
        new="return own",
        names=("prefix", "chunk", "extend"),
    ),
)
