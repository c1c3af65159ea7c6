"""FlexAttention as torch compiles it: one function per specialisation, bounded in its recompilations.

Whatever a kernel can read from a tensor isn't baked into it: positions that bound a row, scale and cap.
Sizes are symbols that stand for themselves: torch takes two that happen to be equal for one (four requests
and four heads), and compiles again when they aren't. Sizes of one are avoided by `flex_blocks`.

What is compiled isn't kept for other processes. Torch finds a kept kernel again by one expression of its
guards, joined by `and` without parentheses. FlexAttention's own guard on batch sizes has an `or`, and guards
on blocks and tiles stand before it: with as many batches of keys as of queries they don't count, so a kernel
for blocks of 16 rows is taken for blocks of 128, where it reads past the lists' ends (torch 2.11 and 2.13;
docs/h200.md has what is shown of it).

On CUDA the compiler writes a Triton kernel. On a CPU it writes none that returns the LSE (torch 2.13),
takes 11 to 28 s of C++ for each variant, and gave NaN for paged masks in some runs; so there the same graph
runs eagerly, its scores spelled out.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch.nn.attention import flex_attention as flex

from anyattn.backends.portable.flex_blocks import Blocks

__all__ = ["Kernel", "Specialisation", "block_mask", "compiled", "kernel_options"]

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`(q [N, H, rows, D], k [N or 1, Hkv, S, D], v [.., Dv], block mask, scales [H], caps [H] or None)` to
`(out, natural-log lse)`; scales and caps are float32."""

_COMPILING = threading.RLock()
_SYMBOLS: Any = symbols
_KEEP_NONE = {"fx_graph_cache": False, "fx_graph_remote_cache": False}


@dataclass(frozen=True)
class Specialisation:
    """All that a compiled function bakes in. Shapes but head counts and sizes are dynamic.

    `shape`: (query heads, KV heads, D, Dv) as the kernel sees them. `blocks`: of the mask, rows and keys.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    capped: bool
    paged: bool
    device: str
    blocks: tuple[int, int]


@functools.cache
def compiled(spec: Specialisation) -> Kernel:
    """The function of a specialisation, the same one for every backend object of the process."""
    gqa = spec.shape[0] != spec.shape[1]
    aux = _lse_arguments()
    options: Any = kernel_options(spec)

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scales: torch.Tensor,
        caps: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        def scored(score: torch.Tensor, b: Any, h: Any, row: Any, key: Any) -> torch.Tensor:
            if caps is None:
                return score * scales[h]
            return caps[h] * torch.tanh(score * scales[h] / caps[h])

        out, stats = flex.flex_attention(
            q, k, v, scored, mask, scale=1.0, enable_gqa=gqa, kernel_options=options, **aux
        )
        return out, (stats if isinstance(stats, torch.Tensor) else stats.lse)

    # Dynamo counts recompilations per code object: each specialisation gets one of its own.
    own = types.FunctionType(
        run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__
    )
    how: dict[str, Any] = {"backend": "inductor", "options": _KEEP_NONE}
    if spec.device == "cpu":
        how = {"backend": "eager"}
    result: Kernel = torch.compile(own, fullgraph=True, dynamic=True, **how)

    def call(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with _COMPILING, _SYMBOLS.patch(use_duck_shape=False):
            return result(*arguments)

    return call


def kernel_options(spec: Specialisation) -> dict[str, Any] | None:
    """Tiles that divide the mask's blocks. No split-KV kernel: it compiles for each batch size."""
    if spec.device == "cpu":
        return None
    q_block, kv_block = spec.blocks
    wide, four_bytes = max(spec.shape[2:]) > 128, spec.dtype == torch.float32
    large = wide and four_bytes  # of 99 KiB of shared memory (SM86, SM89, SM120)
    return {
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": min(q_block, 32 if large else 64),
        "BLOCK_N": min(kv_block, 16 if large else 32 if wide or four_bytes else 64),
        "num_warps": 4,
        "num_stages": 1 if large else 2,
    }


@functools.cache
def _lse_arguments() -> dict[str, Any]:
    """`return_aux` from torch 2.9 on, `return_lse` before. Both give natural logarithms."""
    if "return_aux" in inspect.signature(flex.flex_attention).parameters:
        return {"return_aux": flex.AuxRequest(lse=True)}
    return {"return_lse": True}


def block_mask(blocks: Blocks, block_size: tuple[int, int], lengths: tuple[int, int]) -> flex.BlockMask:
    """A `BlockMask` for the forward pass alone: the lists by key block, which it derives for the backward
    pass by a dense matrix of all blocks, are left out."""
    return flex.BlockMask(
        seq_lengths=lengths,
        kv_num_blocks=blocks.partial[0],
        kv_indices=blocks.partial[1],
        full_kv_num_blocks=blocks.full[0],
        full_kv_indices=blocks.full[1],
        q_num_blocks=None,
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=block_size,
        mask_mod=blocks.mask_mod,
    )
