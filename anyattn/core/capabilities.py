"""Capability data: what a backend can do, as rows of strings and numbers. No torch, no code in the rows.

A `BackendRecord` has rows; a row is a conjunction. A candidate passes a request if one row does; when
none does, the reasons come from the nearest row (the one with the fewest).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from anyattn.errors import ConfigError

__all__ = [
    "CONTRACT_VERSION",
    "BackendRecord",
    "CapabilityRow",
    "Fault",
    "Feature",
    "FormSpec",
    "HeadDims",
    "ModelKind",
    "PageSizes",
    "Phase",
    "Preference",
    "Proof",
    "Provider",
]

CONTRACT_VERSION = 1
"""Version of the contract in `core.contract`; a record names the one that it was written for."""


class Phase(Enum):
    """The roles that a backend is chosen for."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"


class ModelKind(Enum):
    """Families of attention layers; one name may have different classes for them."""

    DENSE = "dense"
    MLA = "mla"
    SPARSE = "sparse"
    LINEAR = "linear"


class Feature(Enum):
    """What a layer or a call may ask for beyond plain causal attention. Undeclared = refused by name."""

    WINDOW = "window"
    LOGIT_CAP = "logit_cap"
    SINKS = "sinks"
    LSE = "lse"
    EXPLICIT_MASK = "explicit_mask"
    BIDIRECTIONAL = "bidirectional"
    ENCODER_ONLY = "encoder_only"
    CROSS = "cross"
    CUSTOM_SCALE = "custom_scale"  # a scale other than 1/sqrt(D)
    KV_SCALES = "kv_scales"  # k/v scales other than 1
    NO_CACHE_WRITE = "no_cache_write"  # attend to k/v arguments that are not stored
    Q_ROPE = "q_rope"
    TOPK_INDICES = "topk_indices"
    INDEXER = "indexer"
    ALIBI = "alibi"
    CHUNKED_LOCAL = "chunked_local"
    RAGGED_VERIFY = "ragged_verify"
    TREE_VERIFY = "tree_verify"


class Proof(Enum):
    """How a row was proven. What didn't run on real hardware says so."""

    HARDWARE = "hardware"
    CPU = "cpu"
    INTERPRETER = "interpreter"
    EMULATED = "emulated"
    CROSS_COMPILED = "cross_compiled"
    UNTESTED = "untested"


@dataclass(frozen=True)
class Provider:
    """A distribution that ships the kernels, with a PEP 440 version range (`""` = any).

    `modules` must be owned by this distribution on the host (several share a module name).
    """

    distribution: str
    versions: str = ""
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeadDims:
    """Allowed (D, Dv): listed pairs, or a range of D with a multiple and the rule for Dv."""

    pairs: tuple[tuple[int, int], ...] = ()
    minimum: int = 1
    maximum: int = 0  # 0 = no range, only `pairs`
    multiple: int = 1
    equal: bool = True  # in the range, Dv must equal D

    def allows(self, head_dim: int, v_head_dim: int) -> bool:
        """True if the pair may be used."""
        if (head_dim, v_head_dim) in self.pairs:
            return True

        def inside(size: int) -> bool:
            return self.minimum <= size <= self.maximum and size % self.multiple == 0

        return inside(head_dim) and inside(v_head_dim) and (not self.equal or head_dim == v_head_dim)

    def __str__(self) -> str:
        parts = [f"{d}" if d == v else f"({d}, {v})" for d, v in self.pairs]
        if self.maximum:
            step = f" in steps of {self.multiple}" if self.multiple > 1 else ""
            parts.append(f"{self.minimum}..{self.maximum}{step}{' with Dv = D' if self.equal else ''}")
        return ", ".join(parts)


@dataclass(frozen=True)
class PageSizes:
    """Kernel pages: listed sizes, or every multiple of `multiple_of` up to `maximum`."""

    sizes: tuple[int, ...] = ()
    multiple_of: int = 0
    maximum: int = 4096

    def allows(self, page: int) -> bool:
        """True if a kernel can read pages of this size."""
        if page in self.sizes:
            return True
        return self.multiple_of > 0 and page % self.multiple_of == 0 and page <= self.maximum

    def kernel_page(self, pool_page: int) -> int | None:
        """The largest kernel page that divides `pool_page`, or None."""
        fitting = [p for p in range(1, pool_page + 1) if pool_page % p == 0 and self.allows(p)]
        return max(fitting, default=None)

    def __str__(self) -> str:
        parts = [str(s) for s in self.sizes]
        if self.multiple_of:
            parts.append("any" if self.multiple_of == 1 else f"multiples of {self.multiple_of}")
        return ", ".join(parts)


@dataclass(frozen=True)
class FormSpec:
    """The table form a kernel reads, in strings and numbers (`core.plan.TableForm` without torch)."""

    kind: Literal["token_csr", "page_csr", "block_table", "request_table"]
    kernel_page: int = 0  # 0 = the page that was chosen for the phase
    fill: int = 0
    width_multiple: int = 1
    index_slack: int = 0
    index_dtype: Literal["int32", "int64"] = "int32"


@dataclass(frozen=True, kw_only=True)
class CapabilityRow:
    """One conjunction: everything in it must hold.

    Attributes:
        phases, kinds, architectures: exact sets; an architecture is `platform:arch`, never a family. Only
            plain torch may say `platform:*`: it runs on chips that nobody listed.
        providers: any one of these distributions (empty = needs none beyond torch).
        requires: distributions that must be there besides (`triton`, `nvidia-cutlass-dsl`, …).
        runtime: PEP 440 range of the CUDA / ROCm / CANN runtime.
        head_dims, dtypes, kv_dtypes, pages, layouts: what tensors may look like. dtypes are torch names.
        form: the table that the kernel reads.
        features: declared features; everything else is refused.
        group_sizes / q_heads / kv_heads: allowed values, empty = any.
        determinism: 0 none, 1 run-to-run, 2 batch-invariant (`core.traits.Determinism`).
        host_lengths: 0 none, 1 bound, 2 exact (`core.traits.HostLengthNeed`).
        graph: 0 never, 1 uniform batches, 2 always (`core.traits.GraphSupport`).
        tolerates_nan_tail: NaN in the unused tail of a request's own last page does no harm.
        degraded: why this row is second-rate though right (slow path, reference).
        method: which inner kernel, shown in the decision.
        proof, source: how it was proven, and where the numbers come from.
    """

    phases: tuple[Phase, ...]
    architectures: tuple[str, ...]
    head_dims: HeadDims
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    pages: PageSizes
    form: FormSpec
    kinds: tuple[ModelKind, ...] = (ModelKind.DENSE,)
    providers: tuple[Provider, ...] = ()
    requires: tuple[Provider, ...] = ()
    runtime: str = ""
    layouts: tuple[str, ...] = ("NHD",)
    features: tuple[Feature, ...] = ()
    group_sizes: tuple[int, ...] = ()
    q_heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    determinism: int = 0
    host_lengths: int = 2
    graph: int = 0
    tolerates_nan_tail: bool = False
    degraded: str | None = None
    method: str = ""
    proof: Proof = Proof.UNTESTED
    source: str = ""

    def serves(self, target: str) -> bool:
        """True if the row is for the chip `platform:arch`."""
        return target in self.architectures or f"{target.partition(':')[0]}:*" in self.architectures


@dataclass(frozen=True)
class Fault:
    """Why a plugin can't be used: what was found, what would do, and the step that mends it."""

    found: str
    allowed: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.found} (wants {self.allowed}); {self.remedy}"


@dataclass(frozen=True)
class BackendRecord:
    """A backend by name: aliases (deprecated ones warn), its class by lazy path, its rows.

    Attributes:
        targets: model kind -> `module:Class`; an empty mapping = no adapter exists yet (`built: false`).
        contract: `CONTRACT_VERSION` that the record was written for, as a number of its own; None is for
            the records of this package alone.
        origin: the distribution that it came from; filled in when it is admitted.
        fault: the record stands for a plugin that can't be used, so that it is named wherever others are.
    """

    name: str
    summary: str
    rows: tuple[CapabilityRow, ...]
    targets: dict[ModelKind, str] = field(default_factory=dict, hash=False)
    deprecated_aliases: tuple[str, ...] = ()
    contract: int | None = None
    origin: str = "anyattn"
    fault: Fault | None = None

    def __post_init__(self) -> None:
        for target in self.targets.values():
            if ":" not in target:
                raise ConfigError(f"target of backend {self.name}", asked=target, allowed="module:Class")

    def row_kinds(self) -> frozenset[ModelKind]:
        """Model kinds that some row serves."""
        return frozenset(k for row in self.rows for k in row.kinds)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Backends in order of preference for one phase and model kind on exact architectures, with evidence.

    `evidence` says why in one or two lines; `date` (YYYY-MM-DD) when that was last checked; `library`
    for which versions. A list that nobody measured says "not measured".
    """

    architectures: tuple[str, ...]
    phase: Phase
    order: tuple[str, ...]
    evidence: str
    date: str
    kind: ModelKind = ModelKind.DENSE
    library: str = ""
