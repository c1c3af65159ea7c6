"""Which feature of a failing case is to blame: it is run again with each one taken away."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from anyattn.errors import ConfigError
from anyattn.testing.cases import Case

__all__ = ["blamed", "simpler"]


def simpler(case: Case) -> Iterator[tuple[str, Case]]:
    """(name of what is taken away, the case without it), for everything that the case asks for."""
    plain: dict[str, tuple[str, object]] = {
        "window": ("the window", None),
        "logit_cap": ("the logit cap", None),
        "sinks": ("the sinks", False),
        "mask": ("the mask", None),
        "scale": ("the softmax scale", None),
        "k_scale": ("the K scale", 1.0),
        "v_scale": ("the V scale", 1.0),
        "padding": ("padding", 0),
        "strided": ("strided inputs", False),
        "flat": ("flat inputs", False),
        "give_out": ("out=", False),
        "return_lse": ("the log-sum-exp", False),
        "device_ints": ("device integers", False),
        "slot_layout": ("scattered slots", "contiguous"),
        "page_size": ("pages above 1", 1),
        "layout": ("the layout", "NHD"),
        "num_q_heads": ("shared KV heads", case.num_kv_heads),
        "kv": ("the KV source", "write"),
        "kv_dtype": ("the KV dtype", case.dtype),
        "v_head_dim": ("unequal head sizes", case.head_dim),
    }
    changes: list[tuple[str, dict[str, Any]]] = [
        (name, {field: value}) for field, (name, value) in plain.items() if getattr(case, field) != value
    ]
    if any(case.prefix_lens):
        changes.append(("a prefix", {"prefix_lens": (0,) * case.batch_size}))
    for name, fields in changes:
        try:
            yield name, dataclasses.replace(case, **fields)
        except ConfigError:  # no such case: an encoder-only layer stores nothing, a cross one has lengths
            continue


def blamed(case: Case, passes: Callable[[Case], bool], refusal: Callable[[Case], str | None]) -> list[str]:
    """Names of what, taken away alone, makes the case pass. Cases that aren't declared are not tried."""
    return [name for name, other in simpler(case) if refusal(other) is None and passes(other)]
