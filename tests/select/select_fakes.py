"""Small records and hosts for the tests of selection; nothing here is a real library."""

from __future__ import annotations

from typing import Any

from anyattn.core.capabilities import (
    BackendRecord,
    CapabilityRow,
    Feature,
    FormSpec,
    HeadDims,
    PageSizes,
    Phase,
    Preference,
    Provider,
)
from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.core.registry import Registry
from anyattn.core.select.decision import Decision
from anyattn.core.select.request import Request
from anyattn.core.select.solve import decide
from anyattn.core.spec import AttentionSpec

HALVES = ("bfloat16", "float16")
ALL_PHASES = tuple(Phase)
SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
KLIB = Provider("klib", ">=2.0,<3", ("klib",))


def row(**fields: Any) -> CapabilityRow:
    """A row for chips x1 and x2: heads of 64 or 128, any page, block table."""
    defaults: dict[str, Any] = {
        "phases": ALL_PHASES,
        "architectures": ("cuda:x1", "cuda:x2"),
        "head_dims": HeadDims(pairs=((64, 64), (128, 128))),
        "dtypes": HALVES,
        "kv_dtypes": HALVES,
        "pages": PageSizes(multiple_of=1),
        "form": FormSpec("block_table"),
        "features": (Feature.LSE, Feature.WINDOW),
    }
    return CapabilityRow(**(defaults | fields))


def record(name: str, *rows: CapabilityRow, built: bool = True, **fields: Any) -> BackendRecord:
    """A record with an adapter for all its kinds unless `built` is False."""
    rows = rows or (row(),)
    kinds = {k for r in rows for k in r.kinds}
    targets = dict.fromkeys(kinds, f"fake.{name}:Backend") if built else {}
    return BackendRecord(name, f"the fake {name}", rows, targets, **fields)


def reference(**fields: Any) -> BackendRecord:
    """The floor: everything, degraded."""
    defaults: dict[str, Any] = {
        "head_dims": HeadDims(maximum=1024, equal=False),
        "dtypes": (*HALVES, "float32"),
        "kv_dtypes": (*HALVES, "float32", "float8_e4m3fn"),
        "form": FormSpec("token_csr", kernel_page=1),
        "layouts": ("NHD", "HND"),
        "features": tuple(Feature),
        "determinism": 1,
        "degraded": "reference, not a fast path",
    }
    return record("torch_native", row(**(defaults | fields)))


def library(
    version: str | None = "2.1", state: LibraryState = LibraryState.UNKNOWN, **more: Any
) -> LibraryFacts:
    """Facts of `klib`, owner of the module of that name."""
    return LibraryFacts("klib", version, more.pop("modules", ("klib",)), state, **more)


def host(arch: str = "x1", *libraries: LibraryFacts, platform: str = "cuda", **fields: Any) -> HostFacts:
    """A real (not simulated) machine."""
    found = {lib.distribution: lib for lib in libraries}
    defaults: dict[str, Any] = {"device_name": "Fake GPU", "runtime": "13.0", "torch": "2.13.0"}
    return HostFacts(platform, arch, libraries=found, **(defaults | fields))


def prefer(*names: str, phase: Phase = Phase.PREFILL, arch: str = "x1", **fields: Any) -> Preference:
    """A list for one phase on one chip."""
    return Preference(
        architectures=(f"cuda:{arch}",),
        phase=phase,
        order=names,
        evidence="a guess",
        date="2026-01-02",
        **fields,
    )


def both(*names: str) -> tuple[Preference, ...]:
    """The same list for prefill and decode."""
    return (prefer(*names), prefer(*names, phase=Phase.DECODE))


def request(*specs: AttentionSpec, **fields: Any) -> Request:
    """A bf16 request for `specs`, default one ordinary layer."""
    return Request(specs=specs or (SPEC,), **({"dtype": "bfloat16", "device": "cuda:0"} | fields))


def run(
    records: tuple[BackendRecord, ...],
    asked: Request | None = None,
    facts: HostFacts | None = None,
    preferences: tuple[Preference, ...] = (),
    **more: Any,
) -> Decision:
    """`decide` with an empty environment unless one is given."""
    more.setdefault("environ", {})
    return decide(asked or request(), facts or host(), Registry(records), preferences, **more)
