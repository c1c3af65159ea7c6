"""Tables of a step in one launch for the families that read block tables or CSR, where Triton is there."""

from __future__ import annotations

import importlib.util
import os
import shutil

import torch

from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.compiler import MetadataCompiler

__all__ = ["offer_filler", "triton_launches"]


def triton_launches(device: torch.device) -> bool:
    """Triton is there, can launch on `device`, and finds the C compiler that its launcher is built with."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return bool(os.environ.get("CC") or any(shutil.which(name) for name in ("gcc", "clang", "cc")))


def offer_filler(compiler: MetadataCompiler, table: RequestTable) -> bool:
    """Give `compiler` the fused filler on a device that Triton compiles for; True if it took it.

    Vendor libraries need no Triton: without it, plain torch fills the same tables in some twenty launches.
    """
    if not triton_launches(compiler.device):
        return False
    from anyattn.kernels.triton.metadata_launch import compile_by_kernels

    compile_by_kernels(compiler, table)
    return True
