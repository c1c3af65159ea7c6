"""Faults in calls on latents: of `flashmla`, `cutedsl_mla`, `fa4`; the list of all. Stand-ins show them."""

from __future__ import annotations

from anyattn.testing.mutants import aiter_latent
from anyattn.testing.mutants.patching import Mutant

__all__ = ["LATENT_MUTANTS"]

_FLASHMLA = "anyattn.backends.cuda.flashmla"
_FORWARD = f"{_FLASHMLA}:FlashMLA.forward_extend"
_STEP = f"{_FLASHMLA}:FlashMLA._step"
_CUTE = "anyattn.backends.cuda.cutedsl_mla"
_SPEED = f"{_CUTE}:_TokenSpeed.__call__"

_FLASHMLA_MUTANTS = (
    Mutant(
        name="flashmla: drafts see those behind them",
        where=_FORWARD,
        old="causal=step.each > 1",
        new="causal=False",
        names=("chain",),
    ),
    Mutant(
        name="flashmla: lengths without this step's tokens",
        where=_FORWARD,
        old="call.plan.seq_lens,",
        new="call.plan.prefix_lens,",
        names=("decode",),
        report="sglang#8340",
    ),
    Mutant(
        name="flashmla: scale of absorbed heads",
        where=_FORWARD,
        old="softmax_scale=layer.spec.scale",
        new="softmax_scale=None",
        names=("decode", "scale"),
    ),
    Mutant(
        name="flashmla: log-sum-exp by heads read as by tokens",
        where=_FORWARD,
        old="by_request(call.lse, step.each).copy_(lse.transpose(1, 2))",
        new="call.lse.copy_(lse.reshape(call.lse.shape))",
        names=("chain",),
        report="sglang#40903",
    ),
    Mutant(
        name="flashmla: log-sum-exp taken for base 2",
        where=_FORWARD,
        old="lse.transpose(1, 2)",
        new="0.6931471805599453 * lse.transpose(1, 2)",
        names=("decode", "chain"),
        report="flashinfer#4485",
    ),
    Mutant(
        name="flashmla: scale of fp8 latents left out",
        where=_FORWARD,
        old='{"descale_k": self.pool.scales(layer.layer_id)[0].device}',
        new='{"descale_k": torch.ones(1)}',
        names=("fp8",),
        report="vllm#55670",
    ),
    Mutant(
        name="flashmla: dense kernels not asked for",
        where=f"{_FLASHMLA}:FlashMLA.__init__",
        old='self._options["use_legacy"] = True',
        new="pass",
        names=("use_legacy",),
    ),
    Mutant(
        name="flashmla: schedule for one query a request",
        where=_STEP,
        old="each * heads, heads",
        new="heads, heads",
        names=("chain",),
    ),
    Mutant(
        name="flashmla: schedule of the step before",
        where=_STEP,
        old="self._schedule(plan.seq_lens,",
        new="self._schedule(plan.prefix_lens,",
        names=("decode", "chain"),
    ),
)

_CUTE_MUTANTS = (
    Mutant(
        name="cutedsl_mla: window for radius",
        where=_SPEED,
        old="spec.sliding_window - 1",
        new="spec.sliding_window",
        names=("window",),
        report="sglang#32087",
    ),
    Mutant(
        name="cutedsl_mla: log-sum-exp left in base 2",
        where=_SPEED,
        old="torch.mul(result[1].view(call.lse.shape), LN2",
        new="torch.mul(result[1].view(call.lse.shape), 1.0",
        names=("decode", "chain"),
        report="flashinfer#4485",
    ),
    Mutant(
        name="cutedsl_mla: scale of fp8 latents left out of the scores",
        where=_SPEED,
        old="softmax_scale=spec.scale * scale",
        new="softmax_scale=spec.scale",
        names=("fp8",),
        report="vllm#55670",
    ),
    Mutant(
        name="cutedsl_mla: scale of fp8 latents left out of the values",
        where=_SPEED,
        old="output_scale=scale",
        new="output_scale=1.0",
        names=("fp8",),
    ),
    Mutant(
        name="cutedsl_mla: scale of absorbed heads",
        where=_SPEED,
        old="softmax_scale=spec.scale * scale",
        new="softmax_scale=576**-0.5 * scale",
        names=("decode", "scale"),
    ),
    Mutant(
        name="cutedsl_mla: workspace in unsigned bytes",
        where=f"{_CUTE}:_TokenSpeed.__init__",
        old="dtype=torch.int8",
        new="dtype=torch.uint8",
        names=("workspace_buffer",),
    ),
    Mutant(
        name="cutedsl_mla: bound of a shorter step",
        where=_SPEED,
        old="max_seq_len=bound",
        new="max_seq_len=32",
        names=("decode",),
    ),
    Mutant(
        name="cutedsl_mla: lengths without this step's tokens",
        where=f"{_CUTE}:CuteDslMLA.forward_extend",
        old="call.table.kv_lens",
        new="call.plan.prefix_lens",
        names=("decode",),
        report="sglang#8340",
    ),
    Mutant(
        name="cutedsl_mla: cells behind a request name page 0",
        where=f"{_CUTE}:CuteDslMLA.init_forward_metadata_in_graph",
        old="repeat_last_page(plan)",
        new="pass",
        names=("decode",),
    ),
    Mutant(
        name="cutedsl_mla: drafts see those behind them",
        where=_SPEED,
        old="return_lse=call.lse is not None,",
        new="return_lse=call.lse is not None, causal_mask=False,",
        names=("chain",),
    ),
)

_FA4_MUTANTS = (
    Mutant(
        name="fa4: log-sum-exp of latents read by heads",
        where="anyattn.backends.cuda.flash_providers:FlashFunction.run",
        old='raw if self.version == 4 and "qv" in given else raw.t()',
        new="raw.t()",
        names=("decode", "chain"),
    ),
    Mutant(
        name="fa4: rope parts of the keys twice",
        where="anyattn.backends.cuda.flash_mla_qv:FlashLatent.forward_extend",
        old="pages[..., rank:], pages[..., :rank]",
        new="pages[..., :64], pages[..., :rank]",
        names=("decode", "chain"),
    ),
)

LATENT_MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "flashmla": _FLASHMLA_MUTANTS,
    "cutedsl_mla": _CUTE_MUTANTS,
    "fa4": _FA4_MUTANTS,
    "aiter": aiter_latent.MUTANTS,
}
"""By the backend that shows them on latent models."""
