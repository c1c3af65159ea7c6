"""What the host knows of a step's lengths, as types: exact values, bounds, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from anyattn.errors import BatchError

__all__ = ["Exact", "HostLengths", "UpperBound", "resolve_host_lengths"]


@dataclass(frozen=True)
class Exact:
    """Lengths known exactly on the host: int64 CPU tensors `[B]`. A batch takes copies."""

    seq_lens: torch.Tensor
    extend_lens: torch.Tensor

    @cached_property
    def longest(self) -> int:
        """KV tokens of the longest request; 0 without any."""
        return int(self.seq_lens.max()) if self.seq_lens.numel() else 0

    @cached_property
    def total(self) -> int:
        """KV tokens of all requests."""
        return int(self.seq_lens.sum())


@dataclass(frozen=True)
class UpperBound:
    """Bounds only: no request has more KV tokens / new tokens than this."""

    max_seq_len: int
    max_extend_len: int = 1


HostLengths = Exact | UpperBound | None


def resolve_host_lengths(
    seq: torch.Tensor, ext: torch.Tensor, given: HostLengths | Literal["copy"]
) -> HostLengths:
    """Exact where `seq` and `ext` are on the CPU already; a device copy only on explicit request.

    Of the batch's own tensors, or copies: what is `given` may be written to later.

    Raises:
        BatchError: `given` contradicts lengths that the host can see, has another batch size, or is none.
    """
    on_host = seq.device.type == "cpu" and ext.device.type == "cpu"
    if given is None or given == "copy":
        wanted = on_host or given == "copy"
        return Exact(seq.cpu(), ext.cpu()) if wanted else None
    if isinstance(given, Exact):
        _check_exact(given, seq, ext, on_host)
        return Exact(seq, ext) if on_host else Exact(given.seq_lens.clone(), given.extend_lens.clone())
    if not isinstance(given, UpperBound):
        raise BatchError(
            "host_lens says what the host knows of the lengths",
            asked=repr(given),
            allowed='Exact(…), UpperBound(…), "copy" or None',
            hint="leave host_lens out: lengths on the CPU are exact",
        )
    if on_host and seq.numel():
        longest = int(seq.max()), int(ext.max())
        if longest[0] > given.max_seq_len or longest[1] > given.max_extend_len:
            raise BatchError(
                "host_lens is no bound of the lengths (KV, new tokens)",
                asked=(given.max_seq_len, given.max_extend_len),
                allowed=f">= {longest}",
                hint="leave host_lens out: lengths on the CPU are exact",
            )
    return given


def _check_exact(given: Exact, seq: torch.Tensor, ext: torch.Tensor, on_host: bool) -> None:
    for values in (given.seq_lens, given.extend_lens):
        if not (isinstance(values, torch.Tensor) and values.is_cpu):
            where = values.device if isinstance(values, torch.Tensor) else type(values).__name__
            raise BatchError(
                "host_lens=Exact(…) holds tensors on the host",
                asked=str(where),
                allowed="integer tensors [B] on the CPU",
                hint="torch.tensor(lengths), or values.cpu() where the step may wait for the device",
            )
    same = given.seq_lens.shape == seq.shape and given.extend_lens.shape == ext.shape
    if same and on_host:
        same = torch.equal(given.seq_lens, seq) and torch.equal(given.extend_lens, ext)
    if not same:
        raise BatchError(
            "host_lens disagrees with the lengths of the batch",
            asked=f"{given.seq_lens.tolist()} / {given.extend_lens.tolist()}",
            allowed=f"{seq.tolist()} / {ext.tolist()}" if on_host else f"{seq.shape[0]} entries each",
            hint="host_lens mirrors prefix_lens + extend_lens and extend_lens",
        )
