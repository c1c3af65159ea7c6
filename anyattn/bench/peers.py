"""Libraries called directly, as somebody would who has only them: who is asked for a cell on a device."""

from __future__ import annotations

import importlib.util

import torch

from anyattn.bench import peers_cpu, peers_flash, peers_flashinfer, peers_mla, peers_torch
from anyattn.bench.cells import Cell
from anyattn.bench.contender import Contender

__all__ = ["peers_of"]


def peers_of(cell: Cell, device: torch.device) -> list[Contender]:
    """Those installed that have a call for the cell. Nothing is imported to find out."""
    if device.type == "cpu":
        return [*peers_torch.contenders(cell), *peers_cpu.contenders(cell)]
    if device.type != "cuda" or torch.version.hip:
        return []
    found: list[Contender] = []
    if cell.mla:
        if _have("flash_mla"):
            found += peers_mla.flashmla(cell)
        if _have("flashinfer"):
            found += peers_mla.flashinfer(cell)
        return found
    if _have("flash_attn_interface"):
        found += peers_flash.contenders(cell)
    if _have("flashinfer"):
        found += peers_flashinfer.contenders(cell)
    return [*found, *peers_torch.contenders(cell)]


def _have(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
