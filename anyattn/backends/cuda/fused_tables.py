"""Tables of a step in one launch for the families that read block tables or CSR, where Triton is there."""

from __future__ import annotations

import importlib.util
import os
import shutil

from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.compiler import MetadataCompiler

__all__ = ["offer_filler"]


def offer_filler(compiler: MetadataCompiler, table: RequestTable) -> bool:
    """Give `compiler` the fused filler on a device that Triton compiles for; True if it took it.

    Vendor libraries need no Triton, so without it, or without the C compiler that its launcher is built
    with, plain torch fills the same tables in some twenty launches.
    """
    if compiler.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    if not (os.environ.get("CC") or any(shutil.which(name) for name in ("gcc", "clang", "cc"))):
        return False
    from anyattn.kernels.triton.metadata_launch import FusedFiller

    compiler.filler = FusedFiller(table)
    return True
