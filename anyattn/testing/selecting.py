"""`select` as the kit calls it: on this machine, or decided for an emulated host with tensors on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import anyattn
from anyattn import api
from anyattn.core.capabilities import BackendRecord
from anyattn.core.facts import HostFacts
from anyattn.core.select.decision import Decision
from anyattn.core.spec import AttentionSpec
from anyattn.errors import SelectionError

__all__ = ["facts_of", "refuse_broken", "select_for"]


def facts_of(device: str | None, host: str | None = None) -> HostFacts:
    """Facts of this machine's `device`, or of an emulated `host`."""
    return api.host_facts(device) if host is None else api.host_facts(host=host)


def refuse_broken(record: BackendRecord) -> None:
    """Raises `SelectionError` with the fault and its remedy, if the record stands for a broken plugin."""
    if record.fault is not None:
        raise SelectionError(
            f"{record.name} can't be verified: its plugin is broken",
            asked=record.fault.found,
            allowed=record.fault.allowed,
            hint=record.fault.remedy,
        )


def select_for(
    specs: Sequence[AttentionSpec], *, device: str, host: str | None = None, **options: Any
) -> Decision:
    """A decision whose pool is made on `device`, whichever host it was decided for.

    Raises:
        As `anyattn.select`.
    """
    if host is None:
        return anyattn.select(specs, device=device, **options)
    decision = anyattn.select(specs, host=host, **options)
    return dataclasses.replace(decision, request=dataclasses.replace(decision.request, device=device))
