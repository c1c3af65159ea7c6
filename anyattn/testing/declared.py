"""What a backend declares for this host, read from its catalog rows: the space its cases come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyattn import api
from anyattn.core.capabilities import BackendRecord, CapabilityRow, Feature, ModelKind, Phase
from anyattn.core.dtypes import is_fp8, torch_dtype
from anyattn.core.facts import HostFacts
from anyattn.core.select.decision import Rejected
from anyattn.core.select.libraries import library_reasons
from anyattn.core.select.pages import kernel_page
from anyattn.core.select.validate import validate
from anyattn.errors import SelectionError
from anyattn.testing.cases import Case
from anyattn.testing.emulators import EMULATORS
from anyattn.testing.selecting import facts_of, refuse_broken
from anyattn.testing.world import case_features

__all__ = ["Declared", "declared"]

_MODE_PHASES = {"decode": Phase.DECODE, "verify": Phase.VERIFY, "draft_extend": Phase.DRAFT}
_KIND_FEATURES = {
    "bidirectional": Feature.BIDIRECTIONAL,
    "encoder_only": Feature.ENCODER_ONLY,
    "cross": Feature.CROSS,
}
_INTERPRETED_FP8 = "Triton's interpreter computes with fp8 wrongly: only a GPU can tell"


@dataclass(frozen=True)
class Declared:
    """A backend's rows for one host.

    Attributes:
        rows: dense rows that serve the host's chip. phases: served by some row.
        interpreted: kernels run in Triton's interpreter. emulated: a stand-in takes the library's place.
    """

    record: BackendRecord
    facts: HostFacts
    rows: tuple[CapabilityRow, ...]
    interpreted: bool = False
    emulated: bool = False

    @property
    def name(self) -> str:
        """The backend's name."""
        return self.record.name

    @property
    def phases(self) -> frozenset[Phase]:
        """Phases that some row serves."""
        return frozenset(phase for row in self.rows for phase in row.phases)

    def rows_for(self, phase: Phase) -> tuple[CapabilityRow, ...]:
        """Rows that serve a phase."""
        return tuple(row for row in self.rows if phase in row.phases)

    def declares(self, feature: Feature) -> bool:
        """Some row has the feature."""
        return any(feature in row.features for row in self.rows)

    def declares_jointly(self, feature: Feature) -> bool:
        """Prefill and decode, whichever of them is served, have rows with the feature: one pool can ask."""
        joint = self.phases & {Phase.PREFILL, Phase.DECODE}
        return all(any(feature in row.features for row in self.rows_for(phase)) for phase in joint)

    def determinism(self) -> int:
        """The highest level that every phase can be asked for."""
        joint = self.phases & {Phase.PREFILL, Phase.DECODE}
        return min((max(r.determinism for r in self.rows_for(p)) for p in joint), default=0)

    def needed(self, mode: str) -> tuple[Phase, ...]:
        """Phases that one pool must serve for a step of this mode."""
        phase = _MODE_PHASES.get(mode, Phase.PREFILL)
        joint = [p for p in (Phase.PREFILL, Phase.DECODE) if p in self.phases]
        return tuple(dict.fromkeys([*joint, phase]))

    def refusal(self, case: Case, deterministic: str | None = None) -> str | None:
        """Why the backend doesn't declare this case, or None: the same judgement as selection's."""
        if self.interpreted and is_fp8(torch_dtype(case.kv_dtype)):
            return _INTERPRETED_FP8
        request = api.make_request(
            [case.spec()],
            dtype=case.dtype,
            kv_dtype=case.kv_dtype,
            page_size=case.page_size,
            layout=case.layout,
            features=case_features(case),
            deterministic=deterministic,
        )
        for phase in self.needed(case.mode):
            verdict = validate(self.record, phase, request, self.facts)
            if isinstance(verdict, Rejected):
                return f"{phase.value}: {verdict.reasons[0]}"
        return None

    def allows(self, row: CapabilityRow, axis: str, value: Any) -> bool:
        """One axis of a case against one row; axes that rows say nothing about are allowed."""
        if axis == "dtypes":
            fp8 = self.interpreted and is_fp8(torch_dtype(value[1]))
            return value[0] in row.dtypes and value[1] in row.kv_dtypes and not fp8
        if axis == "heads":
            return _heads_allowed(row, *value)
        if axis == "head_dims":
            return row.head_dims.allows(*value)
        if axis == "layout":
            return value in row.layouts
        if axis == "page":
            return any(kernel_page(row, value, layout) for layout in row.layouts)
        return _feature_needs(axis, value) <= set(row.features)


def _heads_allowed(row: CapabilityRow, num_q: int, num_kv: int) -> bool:
    limits = ((num_q, row.q_heads), (num_kv, row.kv_heads), (num_q // num_kv, row.group_sizes))
    return all(not allowed or value in allowed for value, allowed in limits)


def _feature_needs(axis: str, value: Any) -> set[Feature]:
    """Features that a value of an axis asks for."""
    asked: Mapping[str, tuple[bool, Feature]] = {
        "window": (value is not None, Feature.WINDOW),
        "cap": (value is not None, Feature.LOGIT_CAP),
        "sinks": (value is True, Feature.SINKS),
        "lse": (value is True, Feature.LSE),
        "mask": (value is not None, Feature.EXPLICIT_MASK),
        "scale": (value is not None, Feature.CUSTOM_SCALE),
        "kv_scale": (value != "one", Feature.KV_SCALES),
        "kv": (value == "arguments", Feature.NO_CACHE_WRITE),
    }
    if axis == "kind":
        return {_KIND_FEATURES[value]} if value in _KIND_FEATURES else set()
    needed, feature = asked.get(axis, (False, Feature.LSE))
    return {feature} if needed else set()


def declared(
    backend: str, device: str | None = None, host: str | None = None, *, emulated: bool | None = None
) -> Declared:
    """What `backend` declares on this machine, or on a `host`: emulated unless said otherwise.

    Raises:
        UnknownNameError: nobody registered that name.
        SelectionError: it serves no dense attention on this chip, can't be built here, or stands for a
            broken plugin.
    """
    record = api.registry().get(backend)
    refuse_broken(record)
    facts = facts_of(device, host)
    rows = tuple(r for r in record.rows if ModelKind.DENSE in r.kinds and r.serves(facts.target))
    if not rows or ModelKind.DENSE not in record.targets:
        hint = f"`anyattn backends` lists what {facts.target} can run"
        if host is None and not rows and record.name in EMULATORS:
            hint = f"--emulated runs it on a stand-in for its library; {hint}"
        raise SelectionError(
            f"{record.name} can't be verified on this host",
            asked=facts.target,
            allowed=_where(record) if not rows else "a backend with an adapter for dense models",
            hint=hint,
        )
    # Cases come from the rows of the libraries that are there: others would be refused one by one.
    rows = tuple(row for row in rows if not library_reasons(row, facts)) or rows
    interpreted = facts.platform == "cpu" and _needs_triton(rows)
    return Declared(
        record, facts, rows, interpreted, emulated=host is not None if emulated is None else emulated
    )


def _where(record: BackendRecord) -> str:
    chips = sorted({a for r in record.rows if ModelKind.DENSE in r.kinds for a in r.architectures})
    return ", ".join(chips) or "no chip: it has no dense rows"


def _needs_triton(rows: tuple[CapabilityRow, ...]) -> bool:
    return any(p.distribution == "triton" for row in rows for p in (*row.requires, *row.providers))
