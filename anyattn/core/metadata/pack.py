"""The vectors of steps of one shape, one behind the other on the host: one copy, and one look at all of them.

What is looked at is what is uploaded. Rows, lengths and slots are compared with their bounds together, which
takes an operation in place of one for each; whatever isn't certainly right is left to the ordinary checks,
which know the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from anyattn.core.batch import Exact, ForwardBatch
from anyattn.core.metadata.slots import SlotCheck

__all__ = ["Pack", "Packs"]

_PER_REQUEST = ("req_pool_indices", "seq_lens", "extend_seq_lens")
_PER_TOKEN = ("out_cache_loc", "positions")
_KEPT = 256  # shapes of steps
_ANY = -1
_numel, _is_cpu = torch.Tensor.numel, torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


class Pack:
    """int64 vectors of batches whose fields are as long."""

    def __init__(
        self, key: tuple[int, ...], lengths: Mapping[str, int], most: Mapping[str, tuple[int, int]],
        slots: SlotCheck, tokens: int,
    ) -> None:  # fmt: skip
        """`lengths` of each field, in the order of uploads; `most`: how many entries of a field are compared
        with a bound, and with which; `tokens`: slots that may not be named twice, or in the sink.

        Raises:
            RuntimeError: there is no numpy.
        """
        self.key = key
        self.lengths = list(lengths.values())
        self._read: Callable[[object], tuple[torch.Tensor, ...]] = attrgetter(*lengths)
        starts, end = {}, 0
        for name, length in lengths.items():
            starts[name] = end
            end += length
        with torch.inference_mode(False):  # written to inside of it and outside
            self._whole = torch.zeros(end, dtype=torch.int64, device="cpu")
        self.wide: Any = self._whole.numpy()
        """All of them, as numpy has it."""
        self.views = tuple(self._whole[starts[name] : starts[name] + n] for name, n in lengths.items())
        bounds = torch.full((end,), _ANY, dtype=torch.int64, device="cpu")
        for name, (count, bound) in most.items():
            bounds[starts[name] : starts[name] + count] = bound
        # As unsigned numbers nothing is above the highest, and what is negative is above every bound.
        self._bounds: Any = bounds.numpy().view("uint64")
        self._unsigned = self._bounds.dtype
        self._own = self.wide, self.views
        self._end = end
        self._inside = b"\1" * end
        at = starts.get("out_cache_loc", 0)
        self._slots = slice(at, at + tokens) if tokens else None
        self._noted: Callable[[Any], bool] = slots.noting(tokens) if tokens else bool

    def take(self, batch: ForwardBatch) -> bool:
        """The vectors of `batch`. False: they aren't all on the host, or not as long as those before."""
        wide = batch.whole
        if wide is not None:  # on the host, and as long as the batch's own numbers say
            self.wide, self.views = wide, self._read(batch)
            return len(wide) == self._end
        self.wide, self.views = self._own
        vectors = self._read(batch)
        if list(map(_numel, vectors)) != self.lengths or not all(map(_is_cpu, vectors)):
            return False
        torch.cat(vectors, out=self._whole)
        return True

    def right(self, wide: Any) -> bool:
        """Rows, lengths and slots of `wide` are certainly those of a batch that can run."""
        if (wide.view(self._unsigned) <= self._bounds).tobytes() != self._inside:
            return False
        return self._slots is None or self._noted(wide[self._slots])


class Packs:
    """Packs of a backend by the shape of its steps."""

    def __init__(self, slots: SlotCheck, max_requests: int, max_context: int, total_slots: int) -> None:
        """Bounds of what a batch may name: rows, KV tokens of a request, slots."""
        self._slots, self._rows, self._context, self._total = slots, max_requests, max_context, total_slots
        self._kept: dict[tuple[int, ...], Pack] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def taken(self, batch: ForwardBatch, *, check: bool) -> Pack | None:
        """The batch's vectors, which are right if they were to be checked; else None, and nothing is known.

        The pack is the caller's until it gives it back: another thread may plan at the same time.
        """
        plain = batch.mask is None and batch.encoder_lens is None and batch.encoder_out_cache_loc is None
        if not (plain and self._slots.by_numpy):
            return None
        exact = batch.host_lens
        if type(exact) is Exact and exact.seq_lens is not batch.seq_lens:
            return None  # the host's lengths are others than those that are looked at here
        key = (
            batch.req_pool_indices.shape[0], batch.num_tokens, batch.num_padding_requests,
            batch.num_padding_tokens, batch.out_cache_loc is None, batch.positions is None,
        )  # fmt: skip
        pack = self._kept.pop(key, None) or self._new(key, batch)
        return pack if pack.take(batch) and (not check or pack.right(pack.wide)) else None

    def give_back(self, pack: Pack) -> None:
        """Its vectors aren't needed any more."""
        if len(self._kept) >= _KEPT:
            self._kept.clear()
        self._kept[pack.key] = pack

    def _new(self, key: tuple[int, ...], batch: ForwardBatch) -> Pack:
        requests, tokens, padded, padded_tokens, *_ = key
        lengths = dict.fromkeys(_PER_REQUEST, requests)
        lengths |= {name: tokens for name in _PER_TOKEN if getattr(batch, name) is not None}
        most = {
            "req_pool_indices": (requests - padded, self._rows - 1),
            "seq_lens": (requests, self._context),
        }
        stored = 0 if batch.out_cache_loc is None else tokens - padded_tokens
        if stored:
            most["out_cache_loc"] = stored, self._total - 1
        return Pack(key, lengths, most, self._slots, stored)
