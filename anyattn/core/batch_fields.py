"""The fields of a `ForwardBatch`, from lists or tensors: sizes, padding and lengths are checked here."""

from __future__ import annotations

from typing import Any, Literal

import torch

from anyattn.core.batch_checks import (
    IntLike,
    as_index,
    check_lengths,
    check_mode,
    check_padding,
    check_rows,
    own,
    side_by_side,
)
from anyattn.core.forward_mode import ForwardMode
from anyattn.core.host_lengths import HostLengths, resolve_host_lengths
from anyattn.core.ids import IdKind, VirtualIds
from anyattn.errors import BatchError

__all__ = ["batch_fields"]


def batch_fields(
    req_pool_indices: IntLike, prefix_lens: IntLike, extend_lens: IntLike,
    out_cache_loc: IntLike | VirtualIds | None, *, seq: torch.Tensor | None = None, mode: ForwardMode,
    positions: IntLike | None = None, encoder_lens: IntLike | None = None,
    encoder_out_cache_loc: IntLike | None = None, host_lens: HostLengths | Literal["copy"] = None,
    num_padding_requests: int = 0, num_padding_tokens: int = 0,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """`ForwardBatch.whole` and fields, as `ForwardBatch.extend` takes them. What is on the host is copied.

    `seq`: KV tokens of requests with one new token each; then no prefix is looked at.

    Raises:
        BatchError: no request, sizes that disagree, negative lengths.
    """
    req = as_index(req_pool_indices, "req_pool_indices")
    prefix = as_index(prefix_lens, "prefix_lens") if seq is None else seq
    ext = as_index(extend_lens, "extend_lens")
    ids = IdKind.VIRTUAL if isinstance(out_cache_loc, VirtualIds) else IdKind.PHYSICAL
    given = out_cache_loc.values if isinstance(out_cache_loc, VirtualIds) else out_cache_loc
    loc = None if given is None else as_index(given, "out_cache_loc")
    batch_size = req.shape[0]
    if batch_size == 0:
        raise BatchError(
            "a batch without requests",
            asked="[]",
            allowed="at least one request",
            hint="use ForwardBatch.idle() for an empty step",
        )
    for name, value in (("prefix_lens", prefix), ("extend_lens", ext)):
        check_rows(value, name, batch_size, "request")
        if seq is None:
            check_lengths(value, name)
    if seq is None:
        check_mode(mode, ext)
    check_padding(num_padding_requests, num_padding_tokens, batch_size)
    on_host = ext.device.type == "cpu"
    if loc is None and not on_host:
        raise BatchError(
            "out_cache_loc=None with device lengths",
            asked=str(ext.device),
            allowed="lengths on the host",
            hint="give extend_lens as a list",
        )
    total = None
    if on_host:
        total = num_padding_tokens + (int(ext.sum()) if seq is None else batch_size)
    tokens = total if loc is None else loc.shape[0]
    assert tokens is not None
    if total is not None and total != tokens:
        raise BatchError(
            "extend_lens (and padding) must add up to out_cache_loc's length",
            asked=total,
            allowed=tokens,
            hint="out_cache_loc has one slot per new token",
        )
    if num_padding_requests and (on_host or mode is ForwardMode.DECODE):
        padded = ext[batch_size - num_padding_requests :]
        counted = on_host and seq is None
        num_padding_tokens += int(padded.sum()) if counted else num_padding_requests
    if seq is None:
        seq = prefix + ext
        check_lengths(seq, "prefix_lens + extend_lens")  # of numbers that no int64 holds
    pos = None if positions is None else as_index(positions, "positions")
    if pos is not None:
        check_rows(pos, "positions", tokens, "token")
    enc = None if encoder_lens is None else as_index(encoder_lens, "encoder_lens")
    if enc is not None:
        check_rows(enc, "encoder_lens", batch_size, "request")
        check_lengths(enc, "encoder_lens")
    enc_loc = (
        None if encoder_out_cache_loc is None else as_index(encoder_out_cache_loc, "encoder_out_cache_loc")
    )
    whole, (req, seq, ext, loc, pos) = side_by_side(req, seq, ext, loc, pos)
    return whole, {
        "forward_mode": mode, "req_pool_indices": req, "seq_lens": seq, "extend_seq_lens": ext,
        "out_cache_loc": loc, "ids": ids, "num_tokens": tokens, "positions": pos,
        "host_lens": resolve_host_lengths(seq, ext, host_lens),
        "encoder_lens": None if enc is None else own(enc),
        "encoder_out_cache_loc": None if enc_loc is None else own(enc_loc),
        "num_padding_requests": num_padding_requests, "num_padding_tokens": num_padding_tokens,
    }  # fmt: skip
