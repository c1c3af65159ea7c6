"""One backend, one phase, one request, one host -> a verdict with reasons. Reads rows, imports nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anyattn.core.capabilities import BackendRecord, CapabilityRow, ModelKind, Phase
from anyattn.core.facts import HostFacts
from anyattn.core.select.decision import Accepted, Degraded, Reason, ReasonCode, Rejected, Verdict
from anyattn.core.select.libraries import library_reasons
from anyattn.core.select.pages import TOKEN_MAJOR, describe_pages, kernel_page
from anyattn.core.select.request import Request
from anyattn.core.spec import AttentionSpec
from anyattn.core.traits import Determinism

__all__ = ["distance", "host_verdict", "is_built", "is_near", "judge_rows", "request_reasons", "validate"]

_WEIGHT = {
    ReasonCode.MODEL_KIND: 1000,
    ReasonCode.PHASE: 100,
    ReasonCode.ARCHITECTURE: 10,
    ReasonCode.PLUGIN_BROKEN: 5,
}
"""How far a reason puts a backend away: one for another phase or chip is no near miss."""

Kinds = frozenset[ModelKind]


def is_built(record: BackendRecord, kind: ModelKind) -> bool:
    """An adapter exists for this model kind."""
    return kind in record.targets


def _names(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values) or "none"


def _union(rows: Iterable[CapabilityRow], attribute: str) -> str:
    values = dict.fromkeys(v for row in rows for v in getattr(row, attribute))
    return _names(getattr(v, "value", v) for v in values)


def _peers(record: BackendRecord, phase: Phase, kinds: Kinds, facts: HostFacts) -> list[CapabilityRow]:
    """Rows for this model kind, phase and chip: only their details say anything about the request."""
    target = facts.target
    return [r for r in record.rows if phase in r.phases and r.serves(target) and kinds <= {*r.kinds}]


def _structural(record: BackendRecord, phase: Phase, kinds: Kinds, facts: HostFacts) -> Reason:
    """Why a record has no peers: it is broken, else the model kind, else the phase, else the chip."""
    if record.fault is not None:
        fault = record.fault
        return Reason(ReasonCode.PLUGIN_BROKEN, fault.found, fault.allowed, fault.remedy)
    alike = [r for r in record.rows if kinds <= set(r.kinds)]
    if not alike:
        asked = _names(sorted(k.value for k in kinds))
        return Reason(ReasonCode.MODEL_KIND, asked, _union(record.rows, "kinds"))
    in_phase = [r for r in alike if phase in r.phases]
    if not in_phase:
        return Reason(ReasonCode.PHASE, phase.value, _union(alike, "phases"))
    return Reason(ReasonCode.ARCHITECTURE, facts.target, _union(in_phase, "architectures"))


def _head_shapes(spec: AttentionSpec, phase: Phase) -> tuple[tuple[int, int], ...]:
    """(D, Dv) that would serve. MLA prefill may run absorbed or materialised, the rest reads the latent."""
    if spec.mla is None:
        return ((spec.head_dim, spec.v_head_dim),)
    mla = spec.mla
    absorbed = (mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank)
    materialised = (mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim)
    return (absorbed, materialised) if phase is Phase.PREFILL else (absorbed,)


def _head_dim_reason(row: CapabilityRow, spec: AttentionSpec, phase: Phase) -> Reason | None:
    shapes = _head_shapes(spec, phase)
    if any(row.head_dims.allows(*shape) for shape in shapes):
        return None
    asked = " or ".join(f"{d}" if d == v else f"({d}, {v})" for d, v in shapes)
    return Reason(ReasonCode.HEAD_DIM, asked, str(row.head_dims))


def _head_count_reason(row: CapabilityRow, spec: AttentionSpec) -> Reason | None:
    kv_heads = spec.num_kv_heads if spec.mla is None else 1  # the latent is one head
    group = spec.num_q_heads // kv_heads
    limits = (
        ("query heads", spec.num_q_heads, row.q_heads),
        ("KV heads", kv_heads, row.kv_heads),
        ("query heads per KV head", group, row.group_sizes),
    )
    for what, value, allowed in limits:
        if allowed and value not in allowed:
            return Reason(ReasonCode.HEAD_COUNT, f"{value} {what}", _names(allowed))
    return None


def _page_reason(row: CapabilityRow, request: Request) -> Reason | None:
    layouts = row.layouts if request.layout is None else (request.layout,)
    if request.page_size is None or not set(layouts) & set(row.layouts):
        return None
    if any(kernel_page(row, request.page_size, layout) for layout in layouts):
        return None
    whole = "" if TOKEN_MAJOR.intersection(layouts, row.layouts) else f" as they are in {_names(layouts)}"
    pages = describe_pages(row)
    multiples = "" if pages == "any" or pages.startswith("multiples") else ", or multiples"
    allowed = f"pool pages of {pages}{whole or multiples}"
    return Reason(ReasonCode.PAGE_SIZE, f"{request.page_size}", allowed)


def _dtype_reasons(row: CapabilityRow, request: Request, peers: Sequence[CapabilityRow]) -> list[Reason]:
    """Rows often come one per dtype, so what is allowed is read from all rows for the phase and chip.

    KV that merely follows a dtype which is refused is no reason of its own.
    """
    if request.dtype in row.dtypes:
        same = [r for r in peers if request.dtype in r.dtypes]
        fits = request.kv_dtype in row.kv_dtypes
        return [] if fits else [_kv_reason(request, same)]
    reasons = [Reason(ReasonCode.DTYPE, request.dtype, _union(peers, "dtypes"))]
    known = {request.dtype}.union(*(r.kv_dtypes for r in peers))
    return reasons if request.kv_dtype in known else [*reasons, _kv_reason(request, peers)]


def _kv_reason(request: Request, rows: Sequence[CapabilityRow]) -> Reason:
    return Reason(ReasonCode.KV_DTYPE, request.kv_dtype, _union(rows, "kv_dtypes"))


def _feature_reasons(row: CapabilityRow, request: Request) -> list[Reason]:
    missing = sorted(f.value for f in request.wanted.difference(row.features))
    declared = _names(sorted(f.value for f in row.features))
    return [Reason(ReasonCode.FEATURE, feature, declared) for feature in missing]


def request_reasons(
    row: CapabilityRow, phase: Phase, request: Request, peers: Sequence[CapabilityRow] = ()
) -> list[Reason]:
    """What the request asks for that the row doesn't allow, in every layer.

    `peers` are the backend's rows for the same phase, kind and chip, to say what else is allowed.
    """
    found: list[Reason | None] = []
    for spec in request.distinct_specs:
        found += [_head_dim_reason(row, spec, phase), _head_count_reason(row, spec)]
    found += _dtype_reasons(row, request, peers or (row,))
    if request.layout is not None and request.layout not in row.layouts:
        found.append(Reason(ReasonCode.LAYOUT, request.layout, _names(row.layouts)))
    found += [_page_reason(row, request), *_feature_reasons(row, request)]
    if row.determinism < request.deterministic:
        names = [d.name.lower().replace("_", "-") for d in Determinism]
        asked, allowed = names[request.deterministic], names[row.determinism]
        found.append(Reason(ReasonCode.DETERMINISM, asked, f"at most {allowed}"))
    return list(dict.fromkeys(r for r in found if r is not None))


def _not_built(record: BackendRecord, kind: ModelKind, facts: HostFacts) -> list[Reason]:
    """A simulated host may show what will come; a real one can't run it."""
    if facts.simulated or is_built(record, kind):
        return []
    built = _names(sorted(k.value for k in record.targets))
    return [Reason(ReasonCode.NOT_BUILT, f"adapter for {kind.value} models", built, "choose another backend")]


def _verdict(row: CapabilityRow, reasons: Sequence[Reason]) -> Verdict:
    if reasons:
        return Rejected(tuple(reasons))
    if row.degraded is not None:
        return Degraded(Reason(ReasonCode.DEGRADED, "a full-speed kernel", row.degraded))
    return Accepted()


def distance(verdict: Verdict) -> int:
    """0 accepted, 1 degraded, more for each reason of a rejection."""
    if isinstance(verdict, Rejected):
        return 2 + sum(_WEIGHT.get(r.code, 1) for r in verdict.reasons)
    return int(isinstance(verdict, Degraded))


def is_near(verdict: Rejected) -> bool:
    """The backend has rows for this model kind, phase and chip; only details are in the way."""
    return all(reason.code not in _WEIGHT for reason in verdict.reasons)


def judge_rows(
    record: BackendRecord, phase: Phase, request: Request, facts: HostFacts
) -> tuple[tuple[CapabilityRow, Verdict], ...]:
    """A verdict on each row for this model kind, phase and chip: passing first, then nearest first.

    Of two as near, the one whose libraries are there: its reason is about what was asked.
    """
    peers = _peers(record, phase, request.kinds, facts)
    unbuilt = _not_built(record, request.model_kind, facts)
    judged = []
    for row in peers:
        missing = library_reasons(row, facts)
        verdict = _verdict(row, [*missing, *request_reasons(row, phase, request, peers), *unbuilt])
        judged.append((distance(verdict), bool(missing), row, verdict))
    return tuple((row, verdict) for *_, row, verdict in sorted(judged, key=lambda item: item[:2]))


def validate(record: BackendRecord, phase: Phase, request: Request, facts: HostFacts) -> Verdict:
    """The verdict on a backend in a phase: of its best row, or of the one nearest to passing."""
    judged = judge_rows(record, phase, request, facts)
    return judged[0][1] if judged else Rejected((_structural(record, phase, request.kinds, facts),))


def host_verdict(record: BackendRecord, phase: Phase, facts: HostFacts) -> Verdict:
    """Could this host run the backend in this phase at all, for some model of a kind that it serves."""
    verdicts = []
    for kind in sorted(record.row_kinds(), key=lambda k: k not in record.targets):
        unbuilt = _not_built(record, kind, facts)
        for row in _peers(record, phase, frozenset({kind}), facts):
            verdicts.append(_verdict(row, [*library_reasons(row, facts), *unbuilt]))
    anything = Rejected((_structural(record, phase, frozenset(), facts),))
    return min(verdicts, key=distance, default=anything)
