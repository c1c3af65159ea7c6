"""The decisions for every simulated host, as text that a reviewer reads: one file a model.

A decision that changes is a diff of these files. `update_snapshot.py` rewrites them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anyattn.api import host_facts, make_request, registry, select
from anyattn.core.capabilities import Phase
from anyattn.core.select.decision import Decision, Degraded, PhaseChoice, ReasonCode, Rejected
from anyattn.core.select.validate import validate
from anyattn.core.spec import AttentionSpec, MLASpec
from anyattn.detect.simulated import HOSTS
from anyattn.errors import SelectionError

__all__ = ["FOLDER", "MODELS", "Model", "decision_of", "dtype_of", "render"]

FOLDER = Path(__file__).parent / "snapshot"


@dataclass(frozen=True)
class Model:
    """One question, asked of every host."""

    title: str
    spec: AttentionSpec
    fp8: bool = False
    note: str = ""


def _dense(**changes: object) -> AttentionSpec:
    sizes: dict[str, object] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    return AttentionSpec(**(sizes | changes))  # type: ignore[arg-type]


_DEEPSEEK = AttentionSpec(
    num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, mla=MLASpec()
)

MODELS: dict[str, Model] = {
    "dense": Model("32/8 heads of 128", _dense()),
    "mla": Model("DeepSeek's MLA: 128 heads over a latent of 512 + 64", _DEEPSEEK),
    "window": Model("32/8 heads of 128, window 4096", _dense(sliding_window=4096)),
    "sinks": Model("64/8 heads of 64 with sinks (GPT-OSS)", _dense(num_q_heads=64, head_dim=64, sinks=True)),
    "fp8_kv": Model(
        "32/8 heads of 128, fp8 KV",
        _dense(),
        fp8=True,
        note="e4m3fnuz on gfx942, e4m3fn elsewhere.",
    ),
    "head_dim_80": Model("32/8 heads of 80", _dense(head_dim=80)),
    "head_dim_512": Model("32/8 heads of 512", _dense(head_dim=512)),
}

_FLOAT32 = ("cpu:avx2", "cpu:arm", "cpu:generic")
_UNTOLD = frozenset({ReasonCode.ARCHITECTURE, ReasonCode.MODEL_KIND, ReasonCode.PHASE})


def dtype_of(host: str) -> str:
    """bfloat16 where the chip has it."""
    if host in _FLOAT32:
        return "float32"
    return "float16" if host == "ascend:310p" else "bfloat16"


def _kv_dtype(model: Model, host: str) -> str:
    if not model.fp8:
        return dtype_of(host)
    return "float8_e4m3fnuz" if host == "rocm:gfx942" else "float8_e4m3fn"


@functools.cache
def decision_of(name: str, host: str) -> Decision:
    """The decision for one model on one simulated host. Raises `SelectionError` where nobody can serve."""
    model = MODELS[name]
    return select([model.spec], dtype=dtype_of(host), kv_dtype=_kv_dtype(model, host), host=host)


def _phase(phase: Phase, choice: PhaseChoice | None) -> Iterator[str]:
    if choice is None:
        yield f"  {phase.value:8} nobody on this pool"
        return
    built = "built" if choice.built else "not built"
    yield (
        f"  {phase.value:8} {choice.backend:14} {choice.method:38} page {choice.kernel_page:<4} "
        f"{choice.how}, {built}"
    )


def _slow(decision: Decision) -> Iterator[str]:
    """Phases whose choice is second-rate, with the reason."""
    told: dict[str, list[str]] = {}
    for phase in Phase:
        choice: PhaseChoice | None = getattr(decision, phase.value)
        if choice is not None and isinstance(choice.verdict, Degraded):
            told.setdefault(choice.verdict.reason.allowed, []).append(phase.value)
    for reason, phases in told.items():
        yield f"  slow ({', '.join(phases)}): {reason}"


def _why_not(decision: Decision) -> Iterator[str]:
    """For each backend of this chip and kind of model that stands back: the first reason."""
    told: dict[str, str] = {}
    for candidate in decision.candidates:
        if candidate.phase not in (Phase.PREFILL, Phase.DECODE):
            continue
        if not isinstance(candidate.verdict, Rejected):
            continue
        reason = candidate.verdict.reasons[0]
        if reason.code not in _UNTOLD:
            allowed = reason.allowed if len(reason.allowed) < 60 else reason.allowed[:57] + "..."
            told[f"{candidate.backend} {reason.code.value}"] = (
                f"  not {candidate.backend}: {reason.code.value} {reason.asked}, allowed {allowed}"
            )
    yield from told.values()


def _why_nobody(name: str, host: str) -> Iterator[str]:
    """For each backend with rows for this chip: why it can't prefill."""
    model, facts = MODELS[name], host_facts(host=host)
    request = make_request(
        [model.spec], dtype=dtype_of(host), kv_dtype=_kv_dtype(model, host), device=facts.platform
    )
    for record in registry().records():
        if any(row.serves(facts.target) for row in record.rows):
            verdict = validate(record, Phase.PREFILL, request, facts)
            assert isinstance(verdict, Rejected)
            reason = verdict.reasons[0]
            yield f"  not {record.name}: {reason.code.value} {reason.asked}, allowed {reason.allowed}"


def _host(name: str, host: str) -> Iterator[str]:
    try:
        decision = decision_of(name, host)
    except SelectionError as error:
        yield f"{host}  {dtype_of(host)}  REFUSED"
        yield f"  {error.message.partition(' (')[0]}"
        yield from _why_nobody(name, host)
        return
    kv = decision.kv
    yield f"{host}  {dtype_of(host)}, KV {kv.dtype}  pages of {kv.page_size}, {kv.layout}"
    for phase in Phase:
        yield from _phase(phase, getattr(decision, phase.value))
    yield from _slow(decision)
    yield from _why_not(decision)


def render(name: str) -> str:
    """The file of one model."""
    model = MODELS[name]
    lines = [f"# {model.title}", "# Simulated hosts with the libraries recorded for them."]
    lines += [f"# {model.note}"] if model.note else []
    for host in HOSTS:
        lines += ["", *(line.rstrip() for line in _host(name, host))]
    return "\n".join(lines) + "\n"
