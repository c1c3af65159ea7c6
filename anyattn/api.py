"""The way in: `select`. The only caller of detection; imports no vendor library and, on its own, no torch."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from anyattn import env
from anyattn.core.arguments import check_instance
from anyattn.core.capabilities import Feature, ModelKind, Preference
from anyattn.core.facts import HostFacts
from anyattn.core.measure.bucket import Workload
from anyattn.core.registry import Registry, load_target
from anyattn.core.select.decision import Decision
from anyattn.core.select.request import Request, canonical_dtype
from anyattn.core.select.solve import decide
from anyattn.core.spec import AttentionSpec, Limits
from anyattn.core.traits import Determinism
from anyattn.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    import torch

    from anyattn.core.graph.objects import GraphPlatform
    from anyattn.core.platform_record import PlatformRecord

__all__ = ["device_type", "graph_platform", "host_facts", "make_request", "platform_preferences",
           "plugin_host", "registry", "select"]  # fmt: skip

E = TypeVar("E", bound=Enum)

_LOG = logging.getLogger("anyattn")


@functools.cache
def registry() -> Registry:
    """The process's registry: the catalog and what plugins bring; broken ones keep a record with a fault.

    Raises:
        ConfigError: `ANYATTN_PLUGINS` or `ANYATTN_PLUGINS_DENIED` names what isn't there.
    """
    from anyattn.detect import plugins

    return Registry(plugins().records)


@functools.cache
def platform_preferences(platform: str) -> tuple[Preference, ...]:
    """Preference lists of a platform."""
    return _platform(platform).preferences


def device_type(platform: str) -> str:
    """torch's device type on a platform: `cuda` on AMD too."""
    return _platform(platform).device


def graph_platform(platform: str, device: torch.device | str) -> GraphPlatform:
    """What captures and replays on a platform: a plugin's class, built with the device, or ours.

    Raises:
        BackendBuildError: the plugin's class can't be loaded. GraphError: no graphs on that device.
    """
    path = _platform(platform).graph
    if path:
        made: GraphPlatform = load_target(path, f"graphs on {platform}")(device)
        return made
    from anyattn.platforms.graphs import graph_platform as built_in

    return built_in(device)


def _platform(name: str) -> PlatformRecord:
    from anyattn.detect import plugins

    return plugins().platform(name)


def plugin_host(device: str) -> str | None:
    """`platform:arch` where `device` is a plugin's platform whose tensors lie on another type of device.

    Raises:
        ConfigError: that device isn't here.
    """
    from anyattn.detect import plugins

    kind = device.partition(":")[0]
    names = {record.name for record in plugins().brought() if record.device != record.name}
    return host_facts(device).target if kind in names else None


@functools.cache
def _detected(device: str | None, visible: tuple[str | None, ...]) -> HostFacts:
    from anyattn.detect import detect_machine, kept_probes, with_probes

    host = detect_machine(device)
    return with_probes(host, kept_probes(host))


@functools.cache
def _simulated(text: str) -> HostFacts:
    from anyattn.detect import simulate

    return simulate(text)


def host_facts(device: str | None = None, host: str | HostFacts | None = None) -> HostFacts:
    """Facts to select by: of `host` (a simulated one by name, or given), of `ANYATTN_ASSUME`, else of here.

    This machine is looked at once per process, device and set of visible devices.

    Raises:
        UnknownNameError: an unknown simulated host.
        ConfigError: a device that isn't there, or not of the simulated host.
    """
    assumed = env.read("ANYATTN_ASSUME") if host is None else None
    host = host if assumed is None else assumed
    if host is None:
        names = (
            "CUDA_VISIBLE_DEVICES",
            "HIP_VISIBLE_DEVICES",
            "ROCR_VISIBLE_DEVICES",
            "ASCEND_RT_VISIBLE_DEVICES",
        )
        return _detected(device, tuple(os.environ.get(name) for name in names))
    hint = "a name as in `anyattn select --assume`, or facts of anyattn.detect"
    facts = _simulated(host) if isinstance(host, str) else check_instance("host", host, HostFacts, hint)
    own = device_type(facts.platform)
    if device is not None and device.partition(":")[0] not in (own, facts.platform):
        hint = "unset ANYATTN_ASSUME" if assumed else f"leave device out, or use {own!r}"
        raise ConfigError("device isn't of the host that is assumed", asked=device, allowed=own, hint=hint)
    return facts


def _determinism(value: int | str | None) -> int:
    if isinstance(value, str):
        names = {d.name.lower().replace("_", "-"): int(d) for d in Determinism}
        if value not in names:
            raise UnknownNameError("determinism", value, names)
        return names[value]
    return int(value or 0)


def _member(kind: type[E], value: E | str) -> E:
    """The member of an enumeration, from itself or its value."""
    known = {str(member.value): member for member in kind}
    text = str(value.value) if isinstance(value, kind) else str(value)
    if text not in known:
        raise UnknownNameError(kind.__name__.lower(), text, known)
    return known[text]


def make_request(
    specs: AttentionSpec | Sequence[AttentionSpec],
    *,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    kv_dtype: torch.dtype | str | None = None,
    deterministic: Determinism | int | str | None = None,
    features: Iterable[Feature | str] = (),
    kind: ModelKind | str | None = None,
    limits: Limits | None = None,
    page_size: int | None = None,
    layout: str | None = None,
    workload: Workload | None = None,
    route: bool | str | Sequence[str] = False,
    **backends: str | None,
) -> Request:
    """A `Request` from what callers have at hand: torch dtypes and devices, names of features and levels.

    Raises:
        UnknownNameError, ConfigError: as in `select`.
    """
    names = (features,) if isinstance(features, str) else features
    if not isinstance(names, Iterable):
        raise ConfigError("features", asked=repr(names), allowed="a list of names", hint='features=["lse"]')
    if not isinstance(specs, Iterable | AttentionSpec):
        raise ConfigError(
            "specs", asked=repr(specs), allowed="one AttentionSpec, or one a layer", hint="specs=[...]"
        )
    return Request(
        specs=(specs,) if isinstance(specs, AttentionSpec) else tuple(specs),
        dtype=canonical_dtype(dtype),
        kv_dtype=canonical_dtype(dtype if kv_dtype is None else kv_dtype),
        device=str(device),
        limits=limits,
        page_size=page_size,
        layout=layout,
        deterministic=_determinism(deterministic),
        features=frozenset(_member(Feature, name) for name in names),
        kind=None if kind is None else _member(ModelKind, kind),
        workload=workload,
        route=_routed(route),
        **backends,
    )


def _routed(route: bool | str | Sequence[str]) -> tuple[str, ...] | None:
    """None without a route, () for any backend, else the names. Raises `ConfigError` for anything else."""
    if isinstance(route, bool):
        return () if route else None
    names = (route,) if isinstance(route, str) else route
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            "route",
            asked=route,
            allowed="True, or names of backends",
            hint='route=True, or ["triton", "fa3"]',
        )
    return tuple(names)


def _tensor_device(device: torch.device | str | None, facts: HostFacts) -> torch.device | str:
    """Where tensors lie: a plugin's platform may be named though its tensors are on another device."""
    own = device_type(facts.platform)
    if device is None:
        return own
    kind, _, index = str(device).partition(":")
    if kind != facts.platform or kind == own:
        return device
    return own if own == "cpu" or not index else f"{own}:{index}"


def _broken_plugins() -> tuple[str, ...]:
    from anyattn.detect import plugins

    return tuple(map(str, plugins().faults))


def select(
    specs: AttentionSpec | Sequence[AttentionSpec],
    *,
    dtype: torch.dtype | str,
    device: torch.device | str | None = None,
    limits: Limits | None = None,
    kv_dtype: torch.dtype | str | None = None,
    page_size: int | None = None,
    layout: str | None = None,
    backend: str | None = None,
    prefill: str | None = None,
    decode: str | None = None,
    verify: str | None = None,
    draft: str | None = None,
    deterministic: Determinism | int | str | None = None,
    features: Iterable[Feature | str] = (),
    kind: ModelKind | str | None = None,
    workload: Workload | None = None,
    route: bool | Sequence[str] = False,
    host: str | HostFacts | None = None,
) -> Decision:
    """Choose backends for prefill, decode, verify and draft, and the KV pool that they share.

    Args:
        specs: the model's attention layers, heads of this rank.
        dtype: of the model; `kv_dtype`: of the KV pool, default the same.
        device: torch device, default the accelerator that this torch can drive, else the CPU.
        limits: bounds of the serving process; `max_draft_tokens > 0` says that it verifies drafts.
        page_size, layout: of the KV pool; honoured or refused, default chosen.
        backend: explicit choice for all phases; `prefill`, `decode`, `verify`, `draft`: for one. Never
            replaced: it is honoured or refused.
        deterministic: `"run-to-run"` or `"batch-invariant"` (or `Determinism`).
        features: what calls will ask for beyond the specs (`Feature.LSE`, `"kv_scales"`, …).
        kind: `"sparse"` or `"linear"` layers, which specs can't tell from others.
        workload: the usual step; measured times near it then decide, instead of the mean of all.
        route: choose the backend of each step by its shape, among all that were measured on this device or
            those named. Where one is the fastest everywhere, or nothing was measured, nothing is routed, and
            a note says so.
        host: a simulated host (`"rocm:gfx942"`) or given facts instead of this machine.

    Raises:
        UnknownNameError: a backend, dtype, feature, layout, host or `ANYATTN_*` variable nobody knows.
        SelectionError: nobody can serve the request, or not the backend that was asked for.
    """
    env.check_environment()
    facts = host_facts(None if device is None else str(device), host)
    request = make_request(
        specs,
        dtype=dtype,
        device=_tensor_device(device, facts),
        limits=limits,
        kv_dtype=kv_dtype,
        page_size=page_size,
        layout=layout,
        backend=backend,
        prefill=prefill,
        decode=decode,
        verify=verify,
        draft=draft,
        deterministic=deterministic,
        features=features,
        kind=kind,
        workload=workload,
        route=route,
    )
    decision = decide(request, facts, registry(), platform_preferences(facts.platform))
    if broken := _broken_plugins():
        decision = dataclasses.replace(decision, notes=(*decision.notes, *broken))
    _LOG.info("%s", decision.summary())
    return decision
