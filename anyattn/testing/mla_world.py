"""A served latent layer with its requests, and the batch of one step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

import anyattn
from anyattn.core.capabilities import Feature
from anyattn.core.dtypes import torch_dtype
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.mla_layer import MLAProjections
from anyattn.core.select.decision import Decision
from anyattn.errors import SelectionError
from anyattn.testing import oracle
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.oracle import OracleRequest
from anyattn.testing.selecting import select_for
from anyattn.testing.world import place_requests

__all__ = ["MLAWorld", "mla_batch", "mla_facts"]

_MODES = {
    "decode": anyattn.ForwardMode.DECODE,
    "extend": anyattn.ForwardMode.EXTEND,
    "mixed": anyattn.ForwardMode.MIXED,
    "verify": anyattn.ForwardMode.TARGET_VERIFY,
    "draft_extend": anyattn.ForwardMode.DRAFT_EXTEND,
}


class MLAWorld:
    """One backend, one latent layer, the requests of a case. What no request owns is NaN.

    `latents [S, rank + rope]` float64: what should stand in each slot, kept apart from the pool under test.
    """

    def __init__(
        self,
        case: MLACase,
        *,
        backend: str | None = "torch_native",
        device: str = "cpu",
        host: str | None = None,
    ) -> None:
        self.case, self.device = case, torch.device(device)
        self.rng, self.generator = random.Random(case.seed), torch.Generator().manual_seed(case.seed)
        self.dtype, self.kv_dtype = torch_dtype(case.dtype), torch_dtype(case.kv_dtype)
        self.slots, pages = place_requests(case.seq_lens, case.page_size, case.slot_layout, self.rng)
        self.decision = _decide(
            case,
            backend,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device=device,
            host=host,
            page_size=case.page_size,
            layout=case.layout,
            features=_features(case),
            limits=anyattn.Limits(
                max_requests=case.batch_size + case.padding + 2,
                max_tokens=sum(case.extend_lens) + case.padding + 1,
                max_context=max(case.seq_lens) + 3,
                max_draft_tokens=8 if case.mode == "verify" else 0,
            ),
        )
        pool = anyattn.kv.create_pool(self.decision, num_slots=pages * case.page_size, k_scale=case.kv_scale)
        assert isinstance(pool, MLAPool)
        self.pool = pool
        self._make_table()
        self.backend = anyattn.create_backend(self.decision, pool, self.table, mla=case.policy())
        heads, rank = case.num_q_heads, case.rank
        self.w_k = self.random(heads, case.nope, rank, std=rank**-0.5)
        self.w_v = self.random(heads, case.v_dim, rank, std=rank**-0.5)
        self.sinks = torch.randn(heads, generator=self.generator) if case.sinks else None
        projections = MLAProjections(self.w_k, self.w_v)
        self.layer = anyattn.AttentionLayer(case.spec(), 0, self.sinks, mla_expand=projections)
        self.layer.to(self.device)
        self._poison()

    def _make_table(self) -> None:
        case = self.case
        self.table = anyattn.kv.RequestTable(
            max_requests=case.batch_size + 2, max_context=max(case.seq_lens) + 3, device=self.device
        )
        self.rows = self.rng.sample(range(self.table.max_requests), case.batch_size)
        owned = set(torch.cat(self.slots).tolist())
        nobody = next(
            s for s in range(self.pool.total_slots - 1, self.pool.page_size - 1, -1) if s not in owned
        )
        self.table.req_to_token[: self.table.max_requests] = nobody
        for row, slots in zip(self.rows, self.slots, strict=True):
            self.table.req_to_token[row, : slots.shape[0]] = slots.to(self.device, torch.int32)

    def _poison(self) -> None:
        for cache in self.pool.caches(0):
            cache.copy_(torch.full(cache.shape, torch.nan).to(cache.dtype))
            if not self.backend.traits(_MODES[self.case.mode]).tolerates_nan_tail:
                owned = torch.cat(self.slots) // self.case.page_size
                cache[owned.to(self.device)] = torch.zeros((), dtype=cache.dtype, device=self.device)
        shape = (self.pool.total_slots, self.case.rank + self.case.rope)
        self.latents = torch.full(shape, torch.nan, dtype=torch.float64)

    def random(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        """Normal values in the model's dtype, on the CPU, reproducible from the case."""
        return (torch.randn(*shape, generator=self.generator) * std).to(self.dtype)

    def expect(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """From now on these latents should stand at `slots`, rounded as the pool stores them."""
        stored = oracle.stored_values(rows[:, None].cpu(), self.kv_dtype, self.case.kv_scale)
        self.latents[slots] = stored[:, 0]

    def fill(self, slots: torch.Tensor) -> None:
        """Prior latents: random values at `slots`, in the pool and in the copy."""
        rows = self.random(slots.shape[0], self.case.rank + self.case.rope)
        self.expect(slots, rows)
        self.pool.write(0, slots.to(self.device), rows[:, None].to(self.device))

    def stored(self, slots: torch.Tensor) -> torch.Tensor:
        """What the storage holds at `slots`, scaled, float64."""
        at, page = slots.to(self.device), self.case.page_size
        parts = [cache[at // page, at % page, 0].flatten(1) for cache in self.pool.caches(0)]
        raw = torch.cat(parts, dim=1).cpu().to(torch.float64)
        return raw * float(torch.tensor(self.case.kv_scale))


def _decide(case: MLACase, backend: str | None, **options: Any) -> Decision:
    """`backend` for all phases; if it doesn't serve them all, for the case's, beside the reference."""
    try:
        return select_for([case.spec()], backend=backend, **options)
    except SelectionError:
        if backend in (None, "torch_native"):
            raise
    role = case.mode if case.mode in ("decode", "verify") else "prefill"
    roles = dict.fromkeys(("prefill", "decode", "verify"), "torch_native") | {role: backend}
    return select_for([case.spec()], **roles, **options)


def mla_facts(
    world: MLAWorld,
) -> tuple[list[OracleRequest], anyattn.ExplicitMask | None, list[int] | None]:
    """Requests as the oracle sees them, the mask and the positions."""
    case, requests = world.case, []
    for row, prefix, new in zip(world.rows, case.prefix_lens, case.extend_lens, strict=True):
        cells, positions = None, None
        if case.mask is not None:
            cells = torch.rand(new, prefix + new, generator=world.generator) < 0.6
        if case.mask == "tree":
            cells, positions = _tree(world.rng, prefix, new)
        slots = oracle.read_slots(world.table.req_to_token.cpu(), row, prefix + new)
        requests.append(OracleRequest(slots=slots, num_queries=new, positions=positions, mask=cells))
    masks = [r.mask for r in requests if r.mask is not None]
    if not masks:
        return requests, None, None
    if case.padding:
        masks.append(torch.empty(0, 0))
    tree = [int(p) for r in requests for p in r.positions or ()]
    return requests, anyattn.ExplicitMask.from_matrices(masks), tree if case.mask == "tree" else None


def _tree(rng: random.Random, cached: int, new: int) -> tuple[torch.Tensor, list[int]]:
    """A random tree of draft tokens: each sees the prefix, its ancestors and itself."""
    mask = torch.zeros(new, cached + new, dtype=torch.bool)
    mask[:, :cached] = True
    positions: list[int] = []
    for token in range(new):
        parent = rng.randrange(-1, token)
        if parent >= 0:
            mask[token] = mask[parent]
        mask[token, cached + token] = True
        positions.append(cached if parent < 0 else positions[parent] + 1)
    return mask, positions


def mla_batch(
    world: MLAWorld, new: torch.Tensor, mask: anyattn.ExplicitMask | None, positions: list[int] | None
) -> anyattn.ForwardBatch:
    """The step of the case; its tokens go to slots `new`."""
    case, padding = world.case, world.case.padding
    rows, loc = list(world.rows), [*new.tolist(), *[0] * padding]
    host: dict[str, Any] = {"host_lens": "copy"} if case.device_ints else {}

    def ints(values: Sequence[int]) -> list[int] | torch.Tensor:
        return (
            torch.tensor(values, dtype=torch.int64, device=world.device) if case.device_ints else list(values)
        )

    if case.mode == "decode":
        fill = world.backend.get_cuda_graph_seq_len_fill_value(anyattn.ForwardMode.DECODE, 1)
        rows += [world.table.padding_row] * padding
        lens = [*case.seq_lens, *[fill] * padding]
        return anyattn.ForwardBatch.decode(
            ints(rows), ints(lens), ints(loc), num_padding_requests=padding, **host
        )
    prefix, extend = list(case.prefix_lens), list(case.extend_lens)
    if padding:
        rows, prefix, extend = [*rows, world.table.padding_row], [*prefix, 0], [*extend, 0]
        host |= {"num_padding_requests": 1, "num_padding_tokens": padding}
    common = (ints(rows), ints(prefix), ints(extend), ints(loc))
    if case.mode == "mixed":
        return anyattn.ForwardBatch.mixed(*common, num_decode=case.num_decode, **host)
    if case.mode == "verify":
        return anyattn.ForwardBatch.verify(*common, mask=mask, positions=positions, **host)
    return anyattn.ForwardBatch.extend(*common, mode=anyattn.ForwardMode(case.mode), mask=mask, **host)


def _features(case: MLACase) -> list[Feature]:
    """Features of the calls, beyond what the spec says."""
    wanted = {
        Feature.LSE: case.return_lse,
        Feature.EXPLICIT_MASK: case.mask is not None,
        Feature.KV_SCALES: case.kv_scale != 1.0,
        Feature.NO_CACHE_WRITE: case.kv == "arguments",
        Feature.Q_ROPE: case.apart,
        Feature.RAGGED_VERIFY: case.mode == "verify" and len(set(case.extend_lens)) > 1,
    }
    return [feature for feature, asked in wanted.items() if asked]
