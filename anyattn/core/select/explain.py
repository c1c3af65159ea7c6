"""A decision in words: for a reader who wants to know in ten seconds what was chosen and why."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from anyattn.core.capabilities import Phase
from anyattn.core.facts import HostFacts
from anyattn.core.measure.bucket import RUNS, Role
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
    ReasonCode.LIBRARY_BLOCKED: "{asked} can't compile its kernels: {hint}",
    ReasonCode.RUNTIME_VERSION: "found {asked}, needs {allowed}",
    ReasonCode.HEAD_DIM: "no head size {asked} (takes {allowed})",
    ReasonCode.HEAD_COUNT: "can't take {asked} (takes {allowed})",
    ReasonCode.DTYPE: "no {asked} (takes {allowed})",
    ReasonCode.KV_DTYPE: "no {asked} KV (takes {allowed})",
    ReasonCode.PAGE_SIZE: "can't read pages of {asked} (takes {allowed})",
    ReasonCode.LAYOUT: "no layout {asked} (takes {allowed})",
    ReasonCode.FEATURE: "no {asked}",
    ReasonCode.DETERMINISM: "not {asked} ({allowed})",
    ReasonCode.NOT_BUILT: "has no adapter in this version",
    ReasonCode.PLUGIN_BROKEN: "broken plugin: {asked}",
    ReasonCode.NO_JOINT_LAYOUT: "needs {allowed}; the pool is {asked}",
    ReasonCode.EXPLICIT_OTHER: "passes, but {asked} was given",
    ReasonCode.DEGRADED: "slow: {allowed}",
}

_HOW = {
    "explicit": "asked for",
    "environment": "asked for by the environment",
    "pinned": "pinned",
    "measured": "fastest measured",
    "priority": "preferred here",
    "only": "the only one",
}

SAME_BACKEND = "same backend as "
"""How the evidence of a phase begins that follows another one."""
UNLISTED = "no list names it"
"""How the evidence begins where nothing but the order of registration spoke."""

_MAIN = (Phase.PREFILL, Phase.DECODE)
_WIDTH = 108


def phrase(reason: Reason) -> str:
    """A reason in a few words, without the remedy."""
    chips = reason.code is ReasonCode.ARCHITECTURE
    allowed = _chips(reason.allowed) if chips else reason.allowed
    return _PHRASES[reason.code].format(asked=reason.asked, allowed=allowed, hint=reason.hint)


def _chips(targets: str) -> str:
    """`cuda:sm90, cuda:sm100` -> `cuda sm90 sm100`."""
    platforms: dict[str, list[str]] = {}
    for target in targets.split(", "):
        platform, _, arch = target.partition(":")
        platforms.setdefault(platform, []).append(arch)
    return ", ".join(" ".join((platform, *archs)) for platform, archs in platforms.items())


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
        *_wrap("model", describe_model(decision.request)),
        *_table(decision),
        f"  KV pool  pages of {kv.page_size} tokens, layout {kv.layout}, {kv.dtype}{_pieces(decision)}",
        *_because(decision),
        *_routes(decision),
        *(line for note in decision.notes for line in _wrap("note", note)),
        *_others(decision),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _wrap(head: str, text: str) -> list[str]:
    """A text under a heading, in the column of the table."""
    indent = " " * 11
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {head:8} ", subsequent_indent=indent)


def _chosen(decision: Decision) -> dict[str, PhaseChoice]:
    """Who was chosen, by phase; mixed steps too, where they have a backend or routes of their own."""
    found: dict[str, PhaseChoice | None] = {}
    for phase in Phase:
        found[phase.value] = getattr(decision, phase.value)
        if phase is Phase.PREFILL and (decision.mixed or decision.route(Role.MIXED)):
            found[Role.MIXED.value] = decision.serving(Role.MIXED)
    return {name: choice for name, choice in found.items() if choice is not None}


def _table(decision: Decision) -> Iterator[str]:
    """One line per phase: backend, method, how it was chosen."""
    chosen = _chosen(decision)
    width = max(len(choice.backend) for choice in chosen.values()) + 2
    method = max(len(choice.method) for choice in chosen.values()) + 2
    routes = {route.role.value: route for route in decision.routes}
    for name in dict.fromkeys((*chosen, *(phase.value for phase in Phase))):
        if name not in chosen:
            yield f"  {name:8} nobody"
            continue
        choice = chosen[name]
        parts = [_label(choice)] if choice.built else [_label(choice), "no adapter in this version"]
        if name in routes:
            parts.append(f"routed with {', '.join(member.backend for member in routes[name].members[1:])}")
        yield f"  {name:8} {choice.backend:{width}}{choice.method:{method}}{'; '.join(parts)}"


def _routes(decision: Decision) -> list[str]:
    """The rows of the table that decide each step, by role and way to run."""
    told = []
    for route in decision.routes:
        for run in RUNS:
            sizes = [f"{rule}: {rule.backend}" for rule in route.rules if rule.run == run]
            if sizes:
                told.append(f"{route.role.value}, {run}, by the nearest of {'; '.join(sizes)}")
    tables = dict.fromkeys(route.table for route in decision.routes if route.table)
    if tables:
        text = "there is a graph for each backend, and a replay picks"
        told.append(f"these are rows of table {', '.join(tables)}; {text}")
    heads = ["routes", *[""] * len(told)]
    return [line for head, text in zip(heads, told, strict=False) for line in _wrap(head, text)]


def _label(choice: PhaseChoice) -> str:
    """How a choice came about, in a few words."""
    if choice.evidence.startswith(SAME_BACKEND):
        return choice.evidence
    return "first registered" if choice.evidence.startswith(UNLISTED) else _HOW[choice.how]


def _because(decision: Decision) -> list[str]:
    """Evidence of each choice, and why a slow one had to do; what is common to phases once."""
    told: dict[str, list[str]] = {}
    for name, choice in _chosen(decision).items():
        if not choice.evidence.startswith(SAME_BACKEND):
            told.setdefault(choice.evidence, []).append(name)
        if isinstance(choice.verdict, Degraded):
            reason = choice.verdict.reason
            text = f"{choice.backend} is slow: {reason.allowed}"
            told.setdefault(f"{text}; {reason.hint}" if reason.hint else text, []).append(name)
    texts = [f"{', '.join(phases)}: {evidence}" for evidence, phases in told.items()]
    heads = ["because", *[""] * len(texts)]
    return [line for head, text in zip(heads, texts, strict=False) for line in _wrap(head, text)]


def _pieces(decision: Decision) -> str:
    """Kernel pages, where a kernel reads the pool's pages in smaller ones. Token tables have none."""
    choices = {phase.value: decision.phase(phase) for phase in _MAIN}
    other = [
        f"{name} {choice.kernel_page}"
        for name, choice in choices.items()
        if choice.kernel_page not in (1, decision.kv.page_size)
    ]
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
    also = [
        line
        for group, names in sorted(groups.items())
        for line in textwrap.wrap(f"  {group}: {', '.join(names)}", _WIDTH, subsequent_indent="    ")
    ]
    return [*(["  why not"] if lines else []), *lines, *also]


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
