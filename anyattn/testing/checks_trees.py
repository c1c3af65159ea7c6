"""Check of a `VerifyMask`: the buffer that a drafter fills, in both forms, for any mix of lengths."""

from __future__ import annotations

import torch

import anyattn
from anyattn.testing.builder import Step, build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Outcome, Subject, gathered
from anyattn.testing.judge import judge, run_step

__all__ = ["verify_mask"]


def verify_mask(subject: Subject, case: Case) -> Outcome:
    """Trees of drafts on prefixes of several lengths, their mask in a `VerifyMask` of either form."""
    reports = []
    for form in anyattn.TreeMaskMode:
        step = build_step(subject.world(case))
        step.batch = step.batch.view(mask=_packed(step, form))
        reports.append((f"verify mask of the form {form.value}", judge(run_step(step))))
    return gathered(reports)


def _packed(step: Step, form: anyattn.TreeMaskMode) -> anyattn.VerifyMask:
    """The masks of the step's requests, one after another; room for more is left behind them."""
    case = step.world.case
    mask = anyattn.VerifyMask.allocate(
        form, max_requests=case.batch_size + 1, draft_tokens=max(case.extend_lens),
        max_context=max(case.seq_lens), device=step.world.device,
    )  # fmt: skip
    own = form is anyattn.TreeMaskMode.QLEN_ONLY
    cells = torch.cat([r.mask[:, r.prefix * own :].flatten() for r in step.requests if r.mask is not None])
    mask.buffer[: cells.numel()] = cells.to(mask.buffer)
    return mask
