"""Which keys a query of fused infer attention sees: sparse modes, their shared mask, masks of one's own."""

from __future__ import annotations

import torch

from anyattn.testing.emulators.modules import EmulationError
from anyattn.testing.emulators.softmax import band, check
from anyattn.testing.emulators.torch_npu_call import FIA, UNBOUNDED

__all__ = ["seen_keys"]

Tensor = torch.Tensor
_MASK = 2048


def seen_keys(fia: FIA, index: int, rows: int, keys: int, longest: int) -> Tensor:
    """Bool `[rows, keys]` of one request."""
    everything = torch.ones(rows, keys, dtype=torch.bool)
    if not fia.tnd and longest == 1 and fia.q_rope is None and fia.mask is None:
        return everything
    if fia.sparse in (0, 1):
        if fia.mask is None:
            check(fia.sparse == 0, "sparse_mode 1 needs a mask")
            return everything
        if fia.sparse == 0 and (fia.pre, fia.next) != (UNBOUNDED, UNBOUNDED):
            raise EmulationError("a band beside a mask of one's own", asked=fia.pre, allowed=UNBOUNDED)
        return ~_own_mask(fia, index, rows, keys)
    check(fia.sparse in (2, 3, 4), f"sparse_mode can't be {fia.sparse}")
    shared = _shared_mask(fia.mask)
    if not shared:
        return torch.zeros(rows, keys, dtype=torch.bool)
    if fia.sparse == 2:
        return band(rows, keys, -1, 0, last=rows - 1)
    if fia.sparse == 3:
        check(not fia.tnd or rows <= keys, f"sparse_mode 3: {rows} queries of {keys} keys")
        return band(rows, keys, -1, 0)
    check(fia.pre >= -rows and fia.next >= -keys and fia.pre + fia.next >= 0, "pre_tokens, next_tokens")
    gap = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)[None, :]
    return (gap <= fia.pre) & (gap >= -fia.next)


def _shared_mask(mask: Tensor | None) -> bool:
    """Is the compressed mask what it must be, hidden above the diagonal? Else the kernel computes garbage.

    Raises:
        RuntimeError: none, or of another shape or dtype.
    """
    check(mask is not None and mask.numel() == _MASK**2, "sparse_mode 2, 3 and 4 need a mask of 2048 x 2048")
    assert mask is not None
    check(mask.shape[-2:] == (_MASK, _MASK), "the mask must be (2048, 2048)")
    check(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask's dtype can't be {mask.dtype}")
    wanted = torch.ones(_MASK, _MASK, dtype=torch.bool).triu(1)
    return torch.equal(mask.reshape(_MASK, _MASK).bool(), wanted)


def _own_mask(fia: FIA, index: int, rows: int, keys: int) -> Tensor:
    """Hidden keys of a mask (Q_S, KV_S), (1, Q_S, KV_S), (B or 1, 1, Q_S, KV_S)."""
    mask = fia.mask
    assert mask is not None
    check(mask.dtype in (torch.bool, torch.int8, torch.uint8), f"atten_mask's dtype can't be {mask.dtype}")
    own = mask[min(index, mask.shape[0] - 1), 0] if mask.dim() == 4 else mask[0] if mask.dim() == 3 else mask
    check(own.shape[0] >= rows and own.shape[1] >= keys, f"atten_mask {list(mask.shape)} is too small")
    if fia.table is not None:
        check(own.shape[1] >= fia.table.shape[1] * fia.block, "atten_mask is narrower than the block table")
    return own[:rows, :keys].bool()
