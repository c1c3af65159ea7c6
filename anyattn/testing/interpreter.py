"""The `triton` backend on a CPU, in Triton's interpreter: for tests, never for serving."""

from __future__ import annotations

import dataclasses
import os

from anyattn import api
from anyattn.catalog.architectures import CPU, SM90
from anyattn.core.capabilities import ModelKind, Proof
from anyattn.errors import ConfigError
from anyattn.testing.interpreter_costs import spare_interpreter

__all__ = ["offer_triton"]


def offer_triton() -> None:
    """Let `select(backend="triton", device="cpu")` succeed in this process: SM90's rows, on CPUs.

    Raises:
        ConfigError: TRITON_INTERPRET isn't set, so that kernels would be compiled for a GPU.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "triton on a CPU runs in the interpreter",
            asked=f"TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET')}",
            allowed="TRITON_INTERPRET=1, set before Triton is imported",
            hint="start the process with it",
        )
    spare_interpreter()
    record = api.registry().get("triton")
    if any(row.architectures == CPU and ModelKind.DENSE in row.kinds for row in record.rows):
        return  # offered already
    rows = tuple(
        dataclasses.replace(
            row, architectures=CPU, degraded="Triton's interpreter: for tests", proof=Proof.INTERPRETER
        )
        for row in record.rows
        if set(SM90) <= set(row.architectures) and ModelKind.DENSE in row.kinds
    )
    others = tuple(row for row in record.rows if ModelKind.DENSE not in row.kinds)
    api.registry().replace(dataclasses.replace(record, rows=(*rows, *others)))
