"""The latent kernels of `triton` on a CPU, in Triton's interpreter: small latents, for tests."""

from __future__ import annotations

import dataclasses
import os

from anyattn import api
from anyattn.catalog.architectures import CPU, SM90
from anyattn.core.capabilities import HeadDims, ModelKind, Proof
from anyattn.errors import ConfigError
from anyattn.testing.interpreter_costs import spare_interpreter

__all__ = ["offer_triton_mla"]


def offer_triton_mla() -> None:
    """Let `select(backend="triton", device="cpu")` serve small latents, in float32 too: SM90's rows.

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
    rows = []
    for row in record.rows:
        if not set(SM90) <= set(row.architectures) or ModelKind.MLA not in row.kinds:
            continue
        dtypes = ("float32", *row.dtypes)
        here = dataclasses.replace(
            row,
            architectures=CPU,
            dtypes=dtypes,
            kv_dtypes=(*row.kv_dtypes, "float32"),
            head_dims=HeadDims(maximum=1024, equal=False),
            degraded="Triton's interpreter: for tests",
            proof=Proof.INTERPRETER,
        )
        rows.append(here)
    kept = tuple(row for row in record.rows if ModelKind.MLA not in row.kinds)
    api.registry().replace(dataclasses.replace(record, rows=(*kept, *rows)))
