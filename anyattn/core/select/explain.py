"""A decision in words: for a reader who wants to know in ten seconds what was chosen and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from anyattn.core.capabilities import Phase
from anyattn.core.facts import HostFacts
from anyattn.core.select.decision import (
    Accepted,
    Decision,
    Degraded,
    PhaseChoice,
    Reason,
    ReasonCode,
    Rejected,
    Verdict,
)
from anyattn.core.select.request import Request
from anyattn.core.spec import AttentionKind, AttentionSpec

__all__ = ["describe_host", "describe_model", "describe_spec", "explain", "phrase", "summary", "why"]

_PHRASES = {
    ReasonCode.PHASE: "has no {asked} kernel (only {allowed})",
    ReasonCode.MODEL_KIND: "serves {allowed} models, not {asked}",
    ReasonCode.ARCHITECTURE: "runs on {allowed}",
    ReasonCode.LIBRARY_MISSING: "{allowed} is not installed",
    ReasonCode.LIBRARY_VERSION: "found {asked}, needs {allowed}",
    ReasonCode.LIBRARY_BROKEN: "{asked} is broken: {hint}",
    ReasonCode.LIBRARY_SHADOWED: "{asked} hides the {allowed}",
    ReasonCode.RUNTIME_VERSION: "found {asked}, needs {allowed}",
    ReasonCode.HEAD_DIM: "no head size {asked} (takes {allowed})",
    ReasonCode.HEAD_COUNT: "can't take {asked} (takes {allowed})",
    ReasonCode.DTYPE: "no {asked} (takes {allowed})",
    ReasonCode.KV_DTYPE: "no {asked} KV (takes {allowed})",
    ReasonCode.PAGE_SIZE: "no page of {asked} (takes {allowed})",
    ReasonCode.LAYOUT: "no layout {asked} (takes {allowed})",
    ReasonCode.FEATURE: "no {asked}",
    ReasonCode.DETERMINISM: "not {asked} ({allowed})",
    ReasonCode.NOT_BUILT: "has no adapter in this version",
    ReasonCode.NO_JOINT_LAYOUT: "needs {allowed}; the pool is {asked}",
    ReasonCode.EXPLICIT_OTHER: "passes, but {asked} was given",
    ReasonCode.DEGRADED: "slow: {allowed}",
}

_MAIN = (Phase.PREFILL, Phase.DECODE)
_WIDTH = 108


def phrase(reason: Reason) -> str:
    """A reason in a few words, without the remedy."""
    return _PHRASES[reason.code].format(asked=reason.asked, allowed=reason.allowed, hint=reason.hint)


def why(verdict: Verdict) -> str:
    """A verdict in a few words; empty when accepted."""
    if isinstance(verdict, Degraded):
        return phrase(verdict.reason)
    return "; ".join(map(phrase, verdict.reasons)) if isinstance(verdict, Rejected) else ""


def _cut(text: str, width: int = _WIDTH) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"


def describe_spec(spec: AttentionSpec) -> str:
    """One layer in a phrase."""
    if spec.mla is not None:
        parts = [f"MLA, {spec.num_q_heads} heads, latent {spec.mla.kv_lora_rank}+{spec.mla.qk_rope_head_dim}"]
    else:
        size = (
            f"{spec.head_dim}" if spec.head_dim == spec.v_head_dim else f"{spec.head_dim}/{spec.v_head_dim}"
        )
        parts = [f"{spec.num_q_heads}/{spec.num_kv_heads} heads of size {size}"]
    if spec.kind is not AttentionKind.CAUSAL:
        parts.append(spec.kind.value)
    if spec.sliding_window is not None:
        parts.append(f"window {spec.sliding_window}")
    if spec.logit_cap is not None:
        parts.append(f"logit cap {spec.logit_cap:g}")
    if spec.sinks:
        parts.append("sinks")
    return ", ".join(parts)


def describe_model(request: Request) -> str:
    """Layers, dtypes and what else was asked for, in a line."""
    counts = Counter(request.specs)
    layers = " + ".join(f"{n} x ({describe_spec(s)})" for s, n in counts.items())
    if len(request.specs) == 1:
        layers = describe_spec(request.specs[0])
    kv = f", KV {request.kv_dtype}" if request.kv_dtype != request.dtype else ""
    extra = "".join(f", {f.value}" for f in sorted(request.features, key=lambda f: f.value))
    return f"{layers}; {request.dtype}{kv}{extra}"


def describe_host(host: HostFacts) -> str:
    """The machine in a phrase."""
    name = host.device_name or f"simulated {host.target}"
    parts = [host.target if host.device_name else "", f"{host.platform} runtime {host.runtime}"]
    detail = ", ".join(filter(None, parts if host.runtime else parts[:1]))
    mark = ", simulated" if host.simulated and host.device_name else ""
    return f"{name} ({detail}{mark})" if detail or mark else name


def summary(decision: Decision) -> str:
    """The decision in one line, for a log."""
    chosen = {p.value: getattr(decision, p.value) for p in Phase}
    parts = [f"{name} {choice.backend}" for name, choice in chosen.items() if choice is not None]
    kv, how = decision.kv, decision.decode.how
    pool = f"page {kv.page_size} {kv.layout} {kv.dtype}"
    return f"{describe_host(decision.host)}: {', '.join(parts)}; {pool}; by {how}; digest {decision.digest()}"


def explain(decision: Decision) -> str:
    """Machine, model, choices with reasons, then why not the others."""
    kv = decision.kv
    lines = [
        f"Attention on {describe_host(decision.host)}",
        f"  model    {describe_model(decision.request)}",
        *_phase_lines(decision),
        f"  KV pool  pages of {kv.page_size} tokens, layout {kv.layout}, {kv.dtype}{_pieces(decision)}",
        *(f"  note     {note}" for note in decision.notes),
        *_others(decision),
    ]
    return "\n".join(lines)


def _phase_lines(decision: Decision) -> Iterator[str]:
    """A line per phase; why a backend is slow is said once."""
    told: set[str] = set()
    for phase in Phase:
        choice: PhaseChoice | None = getattr(decision, phase.value)
        if choice is None:
            yield f"  {phase.value:8} nobody"
            continue
        method = f" ({choice.method})" if choice.method else ""
        mark = "" if choice.built else " [no adapter in this version]"
        yield f"  {phase.value:8} {choice.backend}{method}{mark}: {_cut(_because(choice), 96)}"
        if isinstance(choice.verdict, Degraded) and choice.backend not in told:
            told.add(choice.backend)
            reason = choice.verdict.reason
            yield f"           {_cut(f'slow: {reason.allowed}')}"
            if reason.hint:
                yield f"           {_cut(reason.hint)}"


def _because(choice: PhaseChoice) -> str:
    openings = {
        "explicit": "asked for: ",
        "environment": "asked for by environment: ",
        "measured": "fastest measured: ",
        "only": "the only one: ",
    }
    return openings.get(choice.how, "") + choice.evidence


def _pieces(decision: Decision) -> str:
    """Kernel pages, where they aren't the pool's."""
    pages = {phase.value: decision.phase(phase).kernel_page for phase in _MAIN}
    other = [f"{name} {page}" for name, page in pages.items() if page != decision.kv.page_size]
    return f" (kernel pages: {', '.join(other)})" if other else ""


def _others(decision: Decision) -> list[str]:
    """One line per backend that wasn't taken; other hardware and other models share a line each."""
    chosen = {decision.phase(phase).backend for phase in _MAIN}
    verdicts: dict[str, dict[Phase, Verdict]] = {}
    for candidate in decision.candidates:
        if candidate.phase in _MAIN and candidate.backend not in chosen:
            verdicts.setdefault(candidate.backend, {})[candidate.phase] = candidate.verdict
    groups: dict[str, list[str]] = {}
    lines = []
    for name, by_phase in verdicts.items():
        group = _group(by_phase)
        if group is not None:
            groups.setdefault(group, []).append(name)
        else:
            lines.append("    " + _cut(f"{name:14} {_reasons(by_phase)}"))
    also = [f"  {group}: {', '.join(names)}" for group, names in groups.items()]
    return [*(["  why not"] if lines else []), *lines, *sorted(also)]


def _group(by_phase: dict[Phase, Verdict]) -> str | None:
    """The shared line that a backend goes on, if its verdicts say nothing of its own."""
    if all(isinstance(v, Accepted) for v in by_phase.values()):
        return "also good, ranked lower"
    codes = {r.code for v in by_phase.values() if isinstance(v, Rejected) for r in v.reasons}
    if any(not isinstance(v, Rejected) for v in by_phase.values()):
        return None
    if codes <= {ReasonCode.ARCHITECTURE, ReasonCode.PHASE}:
        return "made for other hardware"
    if ReasonCode.MODEL_KIND in codes:
        return "made for other models"
    return None


def _reasons(by_phase: dict[Phase, Verdict]) -> str:
    told: dict[str, list[str]] = {}
    for phase, verdict in by_phase.items():
        told.setdefault(why(verdict) or "would do, ranked lower", []).append(phase.value)
    if len(told) == 1:
        return next(iter(told))
    return " | ".join(f"{' and '.join(phases)}: {text}" for text, phases in told.items())
