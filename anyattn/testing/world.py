"""A small served world: a backend on its pool and table, requests in it, and what should stand in each slot.

The copies that the oracle reads (`keys`, `values`) are kept here by slot, apart from the pool under test.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import anyattn
from anyattn import api
from anyattn.core.capabilities import Feature, Phase
from anyattn.core.dtypes import torch_dtype
from anyattn.core.kv.pools.base import KVPool
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.spec import AttentionSpec
from anyattn.errors import PoolError
from anyattn.testing.cases import Case
from anyattn.testing.oracle import stored_values
from anyattn.testing.raw_caches import raw_caches
from anyattn.testing.selecting import facts_of, select_for

__all__ = ["World", "case_features", "place_requests", "raw_kv"]

_OWN_PHASE = {"verify": Phase.VERIFY.value, "draft_extend": Phase.DRAFT.value}
_SPARE_PAGES = 3  # owned by nobody and full of NaN


def place_requests(
    lengths: Sequence[int], page_size: int, slot_layout: str, rng: random.Random
) -> tuple[list[torch.Tensor], int]:
    """Slots of each request's tokens, and the pages that it took (page 0 is never handed out).

    `contiguous`: one request after another. `shuffled_pages`: pages in random order. `interleaved`:
    requests take pages in turns. `non_monotonic`: slots fall from page to page.
    """
    counts = [-(-n // page_size) for n in lengths]
    total = sum(counts) + _SPARE_PAGES
    free = list(range(1, total + 1))
    if slot_layout == "shuffled_pages":
        rng.shuffle(free)
    elif slot_layout == "non_monotonic":
        free.reverse()
    owned: list[list[int]] = [[] for _ in counts]
    if slot_layout == "interleaved":
        for turn in range(max(counts, default=0)):
            for pages, count in zip(owned, counts, strict=True):
                if turn < count:
                    pages.append(free.pop(0))
    else:
        for pages, count in zip(owned, counts, strict=True):
            pages.extend(free[:count])
            del free[:count]
    offsets = torch.arange(page_size)
    slots = [
        (torch.tensor(pages, dtype=torch.int64)[:, None] * page_size + offsets).reshape(-1)[:length]
        for pages, length in zip(owned, lengths, strict=True)
    ]
    return slots, total


def raw_kv(pool: KVPool, layer_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V storage by slot, `[S, Hkv, D]` where the layout allows it: NHD, or HND of page 1.

    HND storage gives `[pages, P, Hkv, D]` views; index them with `(slot // P, slot % P)`.

    Raises:
        PoolError: a pool without public storage tensors.
    """
    if not isinstance(pool, MHAPool):
        raise PoolError("no raw view of this pool", asked=type(pool).__name__, allowed="MHAPool")
    caches = pool.key_cache(layer_id), pool.value_cache(layer_id)
    if pool.layout == "HND":
        caches = caches[0].transpose(1, 2), caches[1].transpose(1, 2)
    return caches


class World:
    """One backend, one layer, and the requests of a `Case` with room to grow.

    Everything that no request owns is NaN: page 0, spare pages, and the unused tails of pages where the
    backend declares `tolerates_nan_tail` (zero elsewhere). Table cells behind a request's tokens name
    such a slot, so reading too far shows.

    Args:
        backend: name given to `select`, for the phases that it serves; spare: tokens that each request may
            still grow by.
        raw_prefix: prior KV is put into storage by this class; otherwise by the pool's own `write`.
        specs: layers of the model where the case's isn't the only one; it is number `layer_id`.
        deterministic: as in `select`.
        host: decide for this emulated host, with tensors on `device`.
    """

    def __init__(
        self,
        case: Case,
        *,
        backend: str | None = "torch_native",
        device: str = "cpu",
        spare: int = 0,
        raw_prefix: bool = False,
        specs: Sequence[AttentionSpec] | None = None,
        layer_id: int = 0,
        deterministic: str | None = None,
        host: str | None = None,
    ) -> None:
        self.case, self.device, self.raw_prefix = case, torch.device(device), raw_prefix
        self.layer_id = layer_id
        self.rng = random.Random(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        self.dtype, self.kv_dtype = torch_dtype(case.dtype), torch_dtype(case.kv_dtype)
        encoder = case.encoder_lens or ()
        capacity = [n + spare for n in case.seq_lens]
        slots, pages = place_requests([*capacity, *encoder], case.page_size, case.slot_layout, self.rng)
        self.slots, self.encoder_slots = slots[: len(capacity)], slots[len(capacity) :]
        self.max_context, self.max_encoder = max(1, *capacity) + 3, max(encoder, default=0)
        self.decision = select_for(
            [case.spec()] if specs is None else specs,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=device,
            host=host,
            page_size=case.page_size,
            layout=case.layout,
            features=case_features(case),
            limits=self._limits(),
            deterministic=deterministic,
            **_choices(backend, device, host, case.mode),
        )
        self.pool = anyattn.kv.create_pool(
            self.decision, num_slots=pages * case.page_size, k_scale=case.k_scale, v_scale=case.v_scale
        )
        self.table = self._make_table()
        self.backend = anyattn.create_backend(self.decision, self.pool, self.table)
        self.layer = self.make_layer()
        self._poison()

    def _limits(self) -> anyattn.Limits:
        tokens = sum((*self.case.seq_lens, *(self.case.encoder_lens or ()))) + self.case.padding
        drafts = 8 if max(self.case.extend_lens) > 1 else 1  # libraries may have another kernel for one
        return anyattn.Limits(
            max_requests=self.case.batch_size + self.case.padding + 2,
            max_tokens=max(1, tokens),
            max_context=max(self.max_context, self.max_encoder),
            max_draft_tokens=drafts if self.case.mode == "verify" else 0,
        )

    def _make_table(self) -> anyattn.kv.RequestTable:
        table = anyattn.kv.RequestTable(
            max_requests=self.case.batch_size + 2,
            max_context=self.max_context,
            device=self.device,
            max_encoder=self.max_encoder + 1 if self.encoder_slots else 0,
        )
        self.rows = self.rng.sample(range(table.max_requests), self.case.batch_size)
        nowhere = (
            self.pool.total_slots - 1 if self.case.slot_layout != "non_monotonic" else self.pool.page_size
        )
        table.req_to_token[: table.max_requests] = self._unowned_slot(nowhere)
        for row, slots in zip(self.rows, self.slots, strict=True):
            table.req_to_token[row, : slots.shape[0]] = slots.to(self.device, torch.int32)
        if table.encoder_to_token is not None:
            table.encoder_to_token[: table.max_requests] = self._unowned_slot(nowhere)
            for row, slots in zip(self.rows, self.encoder_slots, strict=True):
                table.encoder_to_token[row, : slots.shape[0]] = slots.to(self.device, torch.int32)
        return table

    def _unowned_slot(self, guess: int) -> int:
        owned = set(torch.cat([*self.slots, *self.encoder_slots]).tolist())
        free = [s for s in range(self.pool.page_size, self.pool.total_slots) if s not in owned]
        return guess if guess in free else free[-1]

    def make_layer(self) -> anyattn.AttentionLayer:
        """A layer of the case with the number `layer_id`; its sinks, drawn anew, are kept for the oracle."""
        sinks = torch.randn(self.case.num_q_heads, generator=self.generator) if self.case.sinks else None
        self.sinks = sinks
        return anyattn.AttentionLayer(self.case.spec(), self.layer_id, sinks=sinks).to(self.device)

    def _poison(self) -> None:
        case, pool = self.case, self.pool
        shape = (pool.total_slots, case.num_kv_heads)
        self.keys = torch.full((*shape, case.head_dim), torch.nan, dtype=torch.float64)
        self.values = torch.full((*shape, case.v_head_dim), torch.nan, dtype=torch.float64)
        # Either mode may be another backend's.
        modes = (anyattn.ForwardMode.EXTEND, anyattn.ForwardMode.DECODE, anyattn.ForwardMode.TARGET_VERIFY)
        nan_tail = all(self.backend.traits(mode).tolerates_nan_tail for mode in modes)
        owned_pages = torch.cat([*self.slots, *self.encoder_slots]) // case.page_size
        for cache in (pool.key_cache(self.layer_id), pool.value_cache(self.layer_id)):
            cache.copy_(torch.full(cache.shape, torch.nan).to(cache.dtype))
            if not nan_tail:
                cache[owned_pages.to(self.device)] = torch.zeros((), dtype=cache.dtype, device=self.device)

    def random(self, *shape: int) -> torch.Tensor:
        """Standard normal values in the model's dtype, reproducible from the case."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def fused(self, tokens: int, *sizes: tuple[int, int], strided: bool) -> list[torch.Tensor]:
        """One `[tokens, heads, size]` tensor per `(heads, size)`; `strided`: slices of one wide tensor."""
        if not strided:
            return [self.random(tokens, *size).to(self.device) for size in sizes]
        wide = self.random(tokens, sum(h * d for h, d in sizes) + 3).to(self.device)
        parts, column = [], 0
        for heads, size in sizes:
            parts.append(wide[:, column : column + heads * size].view(tokens, heads, size))
            column += heads * size
        return parts

    def expect(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """From now on these values should stand at `slots`, rounded as the pool stores them."""
        self.keys[slots] = stored_values(k.cpu(), self.kv_dtype, self.case.k_scale)
        self.values[slots] = stored_values(v.cpu(), self.kv_dtype, self.case.v_scale)

    def fill(self, slots: torch.Tensor) -> None:
        """Prior KV: random values at `slots`, in the pool and in the oracle's copies."""
        count, case = slots.shape[0], self.case
        k = self.random(count, case.num_kv_heads, case.head_dim)
        v = self.random(count, case.num_kv_heads, case.v_head_dim)
        self.expect(slots, k, v)
        if not self.raw_prefix:
            self.pool.write(self.layer_id, slots.to(self.device), k.to(self.device), v.to(self.device))
            return
        for cache, copy, scale in zip(
            raw_caches(self.pool, self.layer_id),
            (self.keys, self.values),
            (case.k_scale, case.v_scale),
            strict=True,
        ):
            factor = torch.tensor(scale, dtype=torch.float32).reshape(-1, 1)
            stored = (copy[slots] / factor.double()).to(self.kv_dtype).to(self.device)
            at = slots.to(self.device)
            cache[at // case.page_size, at % case.page_size] = stored

    def stored(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the pool's storage holds at `slots`, read by layout, scaled: float64 `[n, Hkv, size]`."""
        at = slots.to(self.device)
        read = []
        for cache, scale in zip(
            raw_caches(self.pool, self.layer_id), (self.case.k_scale, self.case.v_scale), strict=True
        ):
            factor = torch.tensor(scale, dtype=torch.float32).reshape(-1, 1).double()
            rows = cache[at // self.case.page_size, at % self.case.page_size]
            read.append(rows.cpu().to(torch.float64) * factor)
        return read[0], read[1]


def _choices(backend: str | None, device: str, host: str | None, mode: str) -> dict[str, str]:
    """`backend` for every phase; one that serves prefill or decode alone gets `torch_native` beside it, so
    that nothing else that is installed decides the verdict.
    """
    if backend is None:
        return {}
    target, serving = facts_of(device, host).target, (Phase.PREFILL, Phase.DECODE)
    rows = [row for row in api.registry().get(backend).rows if row.serves(target)]
    served = [phase for phase in serving if any(phase in row.phases for row in rows)]
    if len(served) != 1:
        return {"backend": backend}
    beside = {phase.value: backend if phase in served else "torch_native" for phase in serving}
    return beside | ({_OWN_PHASE[mode]: backend} if mode in _OWN_PHASE else {})


def case_features(case: Case) -> list[Feature]:
    """Features of the calls, beyond what the spec says."""
    wanted = {
        Feature.LSE: case.return_lse,
        Feature.EXPLICIT_MASK: case.mask is not None,
        Feature.KV_SCALES: not (case.k_scale == case.v_scale == 1.0),
        Feature.NO_CACHE_WRITE: case.kv == "arguments" and case.kind != "encoder_only",
    }
    return [feature for feature, asked in wanted.items() if asked]
