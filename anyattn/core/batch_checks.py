"""Sizes of a batch's fields against each other: what can be said before any table is known."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from anyattn.core.forward_mode import ForwardMode
from anyattn.errors import BatchError

__all__ = [
    "IntLike",
    "as_index",
    "check_decode_rows",
    "check_lengths",
    "check_mode",
    "check_padding",
    "check_rows",
    "own",
    "side_by_side",
]

IntLike = Sequence[int] | torch.Tensor


def as_index(values: IntLike, name: str) -> torch.Tensor:
    """int64 1-D tensor on its own device (lists: on the CPU).

    Raises:
        BatchError: another rank, or entries that aren't integers.
    """
    allowed = "a 1-D integer tensor, or a list of integers"
    if isinstance(values, torch.Tensor):
        dtype = values.dtype
        if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or values.dim() != 1:
            given = f"{dtype} of rank {values.dim()}"
            raise BatchError(
                f"{name} holds integers", asked=given, allowed=allowed, hint=f"convert {name} before"
            )
        return values.to(torch.int64)
    try:
        # Takes whole numbers alone, as `operator.index` does, in a tenth of the time.
        numbers = array("q", list(values))
        if not numbers:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        return torch.frombuffer(numbers, dtype=torch.int64)
    except (TypeError, OverflowError) as error:
        raise BatchError(
            f"{name} holds integers", asked=repr(values), allowed=allowed, hint=f"convert {name} before"
        ) from error


def check_rows(value: torch.Tensor, name: str, rows: int, per: str) -> None:
    """One entry per request or token. Raises `BatchError`."""
    if value.shape[0] != rows:
        raise BatchError(
            f"{name} disagrees with the batch: one entry per {per}",
            asked=value.shape[0],
            allowed=rows,
            hint=f"give {rows} entries",
        )


def check_lengths(value: torch.Tensor, name: str, least: int = 0) -> None:
    """No length on the host is below `least`. Raises `BatchError`."""
    if value.device.type == "cpu" and bool((value < least).any()):
        raise BatchError(
            f"{name} too small",
            asked=value.tolist(),
            allowed=f">= {least}",
            hint="seq_lens counts the token of this step" if least else "lengths count tokens",
        )


def check_padding(num_requests: int, num_tokens: int, batch_size: int) -> None:
    """Padding is a part of the batch. Raises `BatchError`."""
    for name, value, most in (
        ("num_padding_requests", num_requests, batch_size),
        ("num_padding_tokens", num_tokens, None),
    ):
        whole = type(value) is int or hasattr(value, "__index__")
        if not whole or value < 0 or (most is not None and value > most):
            raise BatchError(
                name,
                asked=value if whole else repr(value),
                allowed=">= 0" if most is None else f"0..{most}",
                hint="padded rows are counted in the batch and stand at its end",
            )


def check_decode_rows(ext: torch.Tensor, num_decode: int) -> None:
    """`num_decode` trailing rows exist and, where the host can see it, are one token long.

    Raises:
        BatchError: they don't.
    """
    if not 0 <= num_decode <= ext.shape[0]:
        raise BatchError(
            "num_decode counts requests at the tail",
            asked=num_decode,
            allowed=f"0..{ext.shape[0]}",
            hint="leave it out to take the trailing one-token extends",
        )
    tail = ext[ext.shape[0] - num_decode :]
    if ext.device.type == "cpu" and bool((tail != 1).any()):
        raise BatchError(
            "decode rows of a mixed batch are one token long and stand last",
            asked=ext.tolist(),
            allowed=f"the last {num_decode} equal to 1",
            hint="put prefill chunks first, or lower num_decode",
        )


def check_mode(mode: ForwardMode, ext: torch.Tensor) -> None:
    """A mode, and where it is DECODE one new token a request, as far as the host can see.

    Raises:
        BatchError: another object, or other lengths.
    """
    if not isinstance(mode, ForwardMode):
        raise BatchError(
            "mode of a batch",
            asked=repr(mode),
            allowed=", ".join(f"ForwardMode.{each.name}" for each in ForwardMode),
            hint="ForwardMode(name) makes one of a name",
        )
    if mode is ForwardMode.DECODE and ext.is_cpu and bool((ext != 1).any()):
        raise BatchError(
            "decode runs one new token a request",
            asked=ext.tolist(),
            allowed="extend_lens of 1",
            hint="ForwardBatch.extend without a mode, or mixed",
        )


Vectors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def side_by_side(
    req: torch.Tensor,
    seq: torch.Tensor,
    ext: torch.Tensor,
    loc: torch.Tensor | None,
    pos: torch.Tensor | None,
) -> tuple[Any, Vectors]:
    """Copies of what is on the host: views of one vector, and that one as numpy has it, to be looked at and
    uploaded in one piece.

    None and copies one by one, where not all are on the host; None where there is no numpy.
    """
    given = [x for x in (req, seq, ext, loc, pos) if x is not None]
    if not all(type(x) is torch.Tensor and x.is_cpu for x in given):
        rest = [None if x is None else own(x) for x in (loc, pos)]
        return None, (own(req), own(seq), own(ext), rest[0], rest[1])
    whole = torch.cat(given)
    try:
        wide = whole.numpy()
    except (RuntimeError, TypeError):
        wide = None
    req, seq, ext, *others = torch.split_with_sizes(whole, [x.shape[0] for x in given])
    found = iter(others)
    return wide, (req, seq, ext, None if loc is None else next(found), None if pos is None else next(found))


def own(values: torch.Tensor) -> torch.Tensor:
    """A copy of what is on the host, where its owner may write to it at any time."""
    return values.clone() if values.is_cpu else values
