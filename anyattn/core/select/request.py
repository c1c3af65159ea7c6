"""What is asked of selection: the model's layers, dtypes, explicit choices and guarantees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anyattn.core.arguments import check_instance, check_whole
from anyattn.core.capabilities import Feature, ModelKind, Phase
from anyattn.core.feature_check import layer_features
from anyattn.core.measure.bucket import Workload
from anyattn.core.select.codec import from_plain, to_plain
from anyattn.core.spec import AttentionSpec, Limits
from anyattn.core.traits import Determinism
from anyattn.errors import ConfigError, UnknownNameError

__all__ = ["DTYPES", "Request", "canonical_dtype"]

DTYPES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
    "int8",
    "uint8",
)
"""Element types that tensors of queries or of the KV pool may have, by torch name."""

_SHORT = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
}


def canonical_dtype(name: object) -> str:
    """The torch name, without `torch.`, of a dtype, a torch name or a usual short form (`bf16`, `fp8_e4m3`).

    Raises:
        UnknownNameError: anything else; names the nearest.
    """
    text = str(name).removeprefix("torch.")
    text = _SHORT.get(text, text)
    if text not in DTYPES:
        raise UnknownNameError("dtype", text, DTYPES)
    return text


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to selection.

    Args:
        specs: attention of every layer, heads of this rank.
        dtype: of queries and of the model; `kv_dtype`: of the KV pool, default `dtype`.
        device: torch device the model runs on (`cuda:0`, `npu`, `cpu`).
        limits: bounds of the serving process; `max_draft_tokens > 0` says that it verifies drafts.
        page_size, layout: of the KV pool; None lets selection choose.
        backend: explicit choice for every phase without one of its own; `prefill` … `draft`: per phase.
        deterministic: the `Determinism` wanted, as a number.
        features: asked for in calls, beyond what the specs say (LSE, KV_SCALES, …).
        kind: the model kind where specs can't tell (SPARSE, LINEAR); None = MLA or DENSE, from the specs.
        workload: the usual step, which measured times are read for; None = all measured steps alike.
        route: backends that steps may be routed among, by measured shape; () = any that pass, None = one
            backend a phase.

    Raises:
        ConfigError: no specs, a page below 1, an unknown dtype (UnknownNameError).
    """

    specs: tuple[AttentionSpec, ...]
    dtype: str
    kv_dtype: str = ""
    device: str = "cpu"
    limits: Limits | None = None
    page_size: int | None = None
    layout: str | None = None
    backend: str | None = None
    prefill: str | None = None
    decode: str | None = None
    verify: str | None = None
    draft: str | None = None
    deterministic: int = 0
    features: frozenset[Feature] = frozenset()
    kind: ModelKind | None = None
    workload: Workload | None = None
    route: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        object.__setattr__(self, "kv_dtype", canonical_dtype(self.kv_dtype or self.dtype))
        if self.deterministic not in set(Determinism):
            hint = "0 none, 1 run-to-run, 2 batch-invariant"
            raise ConfigError("deterministic", asked=self.deterministic, allowed="0, 1 or 2", hint=hint)
        if self.route is not None and self.deterministic >= Determinism.BATCH_INVARIANT:
            raise ConfigError(
                "a step that is routed by its shape isn't batch-invariant",
                asked="route with deterministic='batch-invariant'",
                allowed="one of the two",
                hint="leave route out",
            )

    def _check_types(self) -> None:
        if not self.specs:
            hint = "one for each layer of the model"
            raise ConfigError(
                "a model has at least one AttentionSpec", asked="[]", allowed="a list of specs", hint=hint
            )
        for spec in self.specs:
            check_instance("specs of the model", spec, AttentionSpec, "anyattn.AttentionSpec(...)")
        if self.limits is not None:
            check_instance("limits", self.limits, Limits, "anyattn.Limits(max_requests=..., ...)")
        if self.page_size is not None:
            check_whole("page_size counts tokens", self.page_size, 1, hint="leave it out to have it chosen")
        if self.workload is not None:
            check_instance("workload", self.workload, Workload, "anyattn.Workload(requests=..., kv_len=...)")
        for name in ("layout", "backend", *(phase.value for phase in Phase)):
            value = getattr(self, name)
            if value is not None:
                check_instance(name, value, str, "`anyattn backends` lists the names")

    @property
    def model_kind(self) -> ModelKind:
        """Whose class of a backend is used: `kind`, else MLA if some layer is, else DENSE."""
        if self.kind is not None:
            return self.kind
        return ModelKind.MLA if any(s.mla is not None for s in self.specs) else ModelKind.DENSE

    @cached_property
    def kinds(self) -> frozenset[ModelKind]:
        """All kinds that a row must serve: a model may mix MLA layers with dense ones."""
        if self.kind is not None:
            return frozenset({self.kind})
        return frozenset(ModelKind.MLA if s.mla is not None else ModelKind.DENSE for s in self.specs)

    @cached_property
    def distinct_specs(self) -> tuple[AttentionSpec, ...]:
        """The specs without repetitions, in layer order."""
        return tuple(dict.fromkeys(self.specs))

    @cached_property
    def wanted(self) -> frozenset[Feature]:
        """`features` and what the specs imply."""
        return self.features.union(*(layer_features(s) for s in self.distinct_specs))

    @property
    def speculative(self) -> bool:
        """The serving process verifies drafts."""
        return self.limits is not None and self.limits.max_draft_tokens > 0

    def choice(self, phase: Phase) -> str | None:
        """The backend named for exactly this phase."""
        name: str | None = getattr(self, phase.value)
        return name

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives an equal request."""
        data: dict[str, Any] = to_plain(self)
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Request:
        """The request that `to_json` wrote.

        Raises:
            ConfigError: missing or unknown fields, impossible values.
        """
        return from_plain(Request, data)
