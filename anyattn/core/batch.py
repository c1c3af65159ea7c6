"""`ForwardBatch`: what one step computes. Plain data; tables and device copies are the compiler's."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

import torch

from anyattn.core.batch_checks import IntLike, as_index, check_decode_rows, check_lengths, check_padding
from anyattn.core.batch_fields import batch_fields
from anyattn.core.forward_mode import ForwardMode
from anyattn.core.host_lengths import Exact, HostLengths, UpperBound
from anyattn.core.ids import IdKind, VirtualIds
from anyattn.core.masks import ExplicitMask, VerifyMask
from anyattn.errors import BatchError

__all__ = [
    "Exact",
    "ExplicitMask",
    "ForwardBatch",
    "ForwardMode",
    "HostLengths",
    "IntLike",
    "UpperBound",
]

_serials = itertools.count(1)


@dataclass(frozen=True, eq=False)
class ForwardBatch:
    """One step. Build it with `extend`, `decode`, `mixed`, `verify` or `idle`.

    Integer fields may be lists (they stay on the host, exact, and are uploaded once by the compiler)
    or tensors: those on the CPU are copied, in `host_lens`, too; those on the device and masks stay the
    caller's and are read when the batch is planned. B requests, T query tokens.

    To write to a batch's own tensors is an error that only full checks find: what the host concluded from
    them (the longest request, and so the width of tables) may be kept. Make another batch.

    Attributes:
        req_pool_indices: int64 `[B]`, rows of `RequestTable.req_to_token`.
        seq_lens: int64 `[B]`, KV tokens attended to, this step's own included, in every mode.
        extend_seq_lens: int64 `[B]`, query tokens of each request.
        out_cache_loc: int64 `[T]`, slot that each new token's KV is written to, or None (stores nothing).
        positions: int64 `[T]` token positions, or None for `prefix .. seq_len - 1`.
        host_lens: `Exact`, `UpperBound` or None (unknown on the host).
        mask: explicit visibility (TARGET_VERIFY, DLLM_EXTEND), or None; a `VerifyMask` is filled in place.
        encoder_lens, encoder_out_cache_loc: int64 `[B]` and `[sum]` for cross-attention.
        num_decode: decode rows at the tail of a MIXED batch.
        num_padding_requests, num_padding_tokens: rows at the end that stand for nobody; the tokens of
            padded requests count.
        kv_stored: this step's KV is in the pool already, and layers are called without k and v.
        ids: what `out_cache_loc` holds (given as `VirtualIds`: virtual ones).
        captured_mode, logical_mode: mode of the graph, mode before a relabelling; default `forward_mode`.
        serial: identity of this batch, never another's: copies with other fields have their own. A plan
            remembers it.
    """

    forward_mode: ForwardMode
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    extend_seq_lens: torch.Tensor
    out_cache_loc: torch.Tensor | None
    num_tokens: int
    positions: torch.Tensor | None = None
    host_lens: HostLengths = None
    mask: ExplicitMask | VerifyMask | None = None
    encoder_lens: torch.Tensor | None = None
    encoder_out_cache_loc: torch.Tensor | None = None
    spec_info: Any = None
    num_decode: int = 0
    num_padding_requests: int = 0
    num_padding_tokens: int = 0
    kv_stored: bool = False
    captured_mode: ForwardMode | None = None
    logical_mode: ForwardMode | None = None
    ids: IdKind = IdKind.PHYSICAL
    serial: int = field(init=False, default_factory=lambda: next(_serials))
    whole: Any = field(init=False, repr=False, default=None)
    """Vectors on the host (those of encoders left out) one behind the other, in the order of the fields, as
    numpy has them: the fields are views of it. None: they are tensors of their own.
    """

    @property
    def batch_size(self) -> int:
        """B, padding included."""
        return self.req_pool_indices.shape[0]

    @property
    def mode(self) -> ForwardMode:
        """The mode as the scheduler meant it (`logical_mode` where set)."""
        return self.logical_mode or self.forward_mode

    @property
    def exact(self) -> Exact | None:
        """Host lengths if they are exact."""
        return self.host_lens if isinstance(self.host_lens, Exact) else None

    @staticmethod
    def extend(
        req_pool_indices: IntLike,
        prefix_lens: IntLike,
        extend_lens: IntLike,
        out_cache_loc: IntLike | VirtualIds | None,
        *,
        mode: ForwardMode = ForwardMode.EXTEND,
        positions: IntLike | None = None,
        mask: ExplicitMask | VerifyMask | None = None,
        encoder_lens: IntLike | None = None,
        encoder_out_cache_loc: IntLike | None = None,
        host_lens: HostLengths | Literal["copy"] = None,
        num_decode: int = 0,
        num_padding_requests: int = 0,
        num_padding_tokens: int = 0,
        spec_info: Any = None,
    ) -> ForwardBatch:
        """New tokens on top of `prefix_lens` cached ones. An extend length may be 0; B may not.

        `out_cache_loc=None` says that the step stores nothing (encoder-only layers, or layers called
        with `save_kv_cache=False`); the lengths must then be on the host.
        `num_padding_tokens` are rows behind the last request; those of padded requests are added to them
        (outside DECODE with lengths on a device: pass the sum of both).

        Raises:
            BatchError: no request, sizes that disagree, negative lengths.
        """
        if mask is not None and not isinstance(mask, (ExplicitMask, VerifyMask)):
            raise BatchError(
                "the mask of a batch",
                asked=type(mask).__name__,
                allowed="ExplicitMask, VerifyMask or None",
                hint="ExplicitMask.from_matrices with one [extend_len, seq_len] matrix per request",
            )
        whole, fields = batch_fields(
            req_pool_indices, prefix_lens, extend_lens, out_cache_loc, mode=mode, positions=positions,
            encoder_lens=encoder_lens, encoder_out_cache_loc=encoder_out_cache_loc, host_lens=host_lens,
            num_padding_requests=num_padding_requests, num_padding_tokens=num_padding_tokens,
        )  # fmt: skip
        fields.update(mask=mask, num_decode=num_decode, spec_info=spec_info)
        return ForwardBatch._made(whole, fields)

    @staticmethod
    def _made(whole: Any, fields: dict[str, Any]) -> ForwardBatch:
        made = ForwardBatch(**fields)
        made.__dict__["whole"] = whole
        return made

    @staticmethod
    def decode(
        req_pool_indices: IntLike,
        seq_lens: IntLike,
        out_cache_loc: IntLike | VirtualIds,
        *,
        positions: IntLike | None = None,
        encoder_lens: IntLike | None = None,
        host_lens: HostLengths | Literal["copy"] = None,
        num_padding_requests: int = 0,
        spec_info: Any = None,
    ) -> ForwardBatch:
        """One token per request; `seq_lens` include it.

        Raises:
            BatchError: no request, sizes that disagree, a length below 1.
        """
        seq = as_index(seq_lens, "seq_lens")
        check_padding(num_padding_requests, 0, seq.shape[0])
        check_lengths(seq[: seq.shape[0] - num_padding_requests], "seq_lens", least=1)
        whole, fields = batch_fields(
            req_pool_indices, seq, torch.ones_like(seq), out_cache_loc, seq=seq.clamp_min(1),
            mode=ForwardMode.DECODE, positions=positions, encoder_lens=encoder_lens, host_lens=host_lens,
            num_padding_requests=num_padding_requests,
        )  # fmt: skip
        fields["spec_info"] = spec_info
        return ForwardBatch._made(whole, fields)

    @staticmethod
    def mixed(
        req_pool_indices: IntLike,
        prefix_lens: IntLike,
        extend_lens: IntLike,
        out_cache_loc: IntLike | VirtualIds,
        *,
        num_decode: int | None = None,
        host_lens: HostLengths | Literal["copy"] = None,
    ) -> ForwardBatch:
        """Prefill chunks first, decode rows (one-token extends) last.

        `num_decode` defaults to the trailing run of one-token extends; it must be given when the
        lengths are on a device.

        Raises:
            BatchError: as `extend`, or a decode row that isn't one token long.
        """
        ext = as_index(extend_lens, "extend_lens")
        if num_decode is None:
            if ext.device.type != "cpu":
                raise BatchError(
                    "mixed() with device lengths",
                    asked=str(ext.device),
                    allowed="num_decode given, or lengths on the host",
                    hint="pass num_decode",
                )
            num_decode = sum(1 for _ in itertools.takewhile(lambda n: n == 1, reversed(ext.tolist())))
        check_decode_rows(ext, num_decode)
        return ForwardBatch.extend(
            req_pool_indices,
            prefix_lens,
            ext,
            out_cache_loc,
            mode=ForwardMode.MIXED,
            host_lens=host_lens,
            num_decode=num_decode,
        )

    @staticmethod
    def verify(
        req_pool_indices: IntLike,
        prefix_lens: IntLike,
        draft_lens: IntLike,
        out_cache_loc: IntLike | VirtualIds,
        *,
        mask: ExplicitMask | VerifyMask | None = None,
        positions: IntLike | None = None,
        host_lens: HostLengths | Literal["copy"] = None,
        num_padding_requests: int = 0,
        num_padding_tokens: int = 0,
    ) -> ForwardBatch:
        """Draft tokens to verify: a chain without `mask`, a tree with one. Lengths may differ.

        Raises:
            BatchError: as `extend`, or a tree without `positions`.
        """
        if mask is not None and positions is None:
            raise BatchError(
                "a tree of draft tokens has positions of its own",
                asked="a mask without positions",
                allowed="positions [T]: prefix + depth in the tree",
                hint="Tree.positions(prefix_len), or leave the mask out for a chain",
            )
        return ForwardBatch.extend(
            req_pool_indices,
            prefix_lens,
            draft_lens,
            out_cache_loc,
            mode=ForwardMode.TARGET_VERIFY,
            mask=mask,
            positions=positions,
            host_lens=host_lens,
            num_padding_requests=num_padding_requests,
            num_padding_tokens=num_padding_tokens,
        )

    @staticmethod
    def idle() -> ForwardBatch:
        """An empty step: no request, no token, no kernel."""
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        return ForwardBatch(
            ForwardMode.IDLE, none, none, none, none, num_tokens=0, host_lens=Exact(none, none)
        )

    def view(self, **fields: Any) -> ForwardBatch:
        """A copy with other fields and a new identity, unchecked: for replay buffers.

        Raises:
            TypeError: a field that a batch doesn't have.
        """
        if not _FIELDS.issuperset(fields):
            raise TypeError(f"ForwardBatch has no field {', '.join(sorted(fields.keys() - _FIELDS))}")
        made = object.__new__(ForwardBatch)  # `dataclasses.replace` takes ten times as long, once a step
        made.__dict__.update(self.__dict__, serial=next(_serials), **fields)
        if made.whole is not None and not _IN_WHOLE.isdisjoint(fields):
            made.__dict__["whole"] = None
        return made

    def as_captured(self, mode: ForwardMode) -> ForwardBatch:
        """The same batch, of a graph's bucket as it is: `view(captured_mode=mode)`, once a step."""
        made = object.__new__(ForwardBatch)
        made.__dict__.update(self.__dict__, serial=next(_serials), captured_mode=mode)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For `copy` and `pickle`: whose vectors are copied one by one, and then lie beside no other."""
        return {**self.__dict__, "whole": None}


_FIELDS = frozenset(each.name for each in dataclass_fields(ForwardBatch)) - {"serial", "whole"}
_IN_WHOLE = frozenset(("req_pool_indices", "seq_lens", "extend_seq_lens", "out_cache_loc", "positions"))
