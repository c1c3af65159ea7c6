"""Served requests on a model with windows, dual pool or not, each step judged by the oracle.

Storage that nobody may read is NaN at all times: free pages, evicted ones, and page 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import anyattn
from anyattn.core.blocks import block_causal_mask
from anyattn.core.ids import IdKind, VirtualIds
from anyattn.core.kv.allocator import PageAllocator, pages_for
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.pools.window import WindowPool, window_slots_for
from anyattn.core.kv.window_allocator import WindowAllocator
from anyattn.core.plan import Plan
from anyattn.testing import oracle
from anyattn.testing.judge import planned_in_buffers

__all__ = ["Open", "Request", "Served", "tree_of"]

_MOST = 4096  # tokens of a request that the oracle's copies have room for


@dataclass(eq=False)
class Request:
    """One request: its row, its pages, its tokens so far, and what every layer should remember of them."""

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Open:
    """A step between its planning and its end."""

    batch: anyattn.ForwardBatch
    plan: Plan
    new: Mapping[Request, int]
    tree: Mapping[Request, tuple[torch.Tensor, list[int]]] | None


class Served:
    """A backend on a pool, requests with histories, and steps that are compared with the oracle.

    Args:
        specs: the model's layers. dual: window layers in pools of their own, as small as
            `window_slots_for` allows. virtual: the table lists virtual ids, three times as many.
        max_step: most new tokens of a step. evict: give window pages up after each step (False: keep all).
    """

    def __init__(
        self,
        specs: Sequence[anyattn.AttentionSpec],
        *,
        backend: str = "torch_native",
        device: str = "cpu",
        dual: bool = True,
        virtual: bool = False,
        page_size: int = 4,
        layout: str = "NHD",
        max_requests: int = 4,
        max_context: int = 256,
        max_step: int = 64,
        evict: bool = True,
        buffers: bool = False,
        seed: int = 0,
    ) -> None:
        self.specs, self.evicting = tuple(specs), evict
        self.generator = torch.Generator().manual_seed(seed)
        limits = anyattn.Limits(max_requests, max_step + max_requests, max_context, max_draft_tokens=16)
        self.decision = anyattn.select(
            self.specs, dtype=torch.float32, device=device, backend=backend, page_size=page_size,
            layout=layout, limits=limits, features=["lse", "explicit_mask"],
        )  # fmt: skip
        sizes = {s.sliding_window for s in self.specs if s.sliding_window is not None}
        small = {w: window_slots_for(w, page_size, max_requests, max_step) for w in sizes}
        slots = max_requests * pages_for(max_context, page_size) * page_size
        made = anyattn.kv.create_pool(
            self.decision,
            num_slots=slots,
            window_slots=small if dual and small else None,
            num_ids=3 * slots if virtual else None,
        )
        assert isinstance(made, MHAPool)
        self.pool = made
        kind = anyattn.kv.VirtualTable if virtual else anyattn.kv.RequestTable
        self.table = kind(max_requests=max_requests, max_context=max_context, device=device)
        self.backend = anyattn.create_backend(self.decision, self.pool, self.table)
        self._buffers = buffers
        if buffers:
            self.backend.init_cuda_graph_state(limits)
        self.allocator = (
            WindowAllocator(self.pool, seed=seed)
            if isinstance(self.pool, WindowPool)
            else PageAllocator(slots, page_size, seed=seed)
        )
        self.layers = [self._layer(i, spec).to(device) for i, spec in enumerate(self.specs)]
        self._free_rows = list(range(max_requests))
        random.Random(seed).shuffle(self._free_rows)
        self.plan: Plan | None = None
        self.block = 8  # tokens of a block of diffusion
        for layer in range(len(self.specs)):
            for cache in (self.pool.key_cache(layer), self.pool.value_cache(layer)):
                cache.fill_(torch.nan)

    def _layer(self, index: int, spec: anyattn.AttentionSpec) -> anyattn.AttentionLayer:
        sinks = torch.randn(spec.num_q_heads, generator=self.generator) if spec.sinks else None
        return anyattn.AttentionLayer(spec, index, sinks=sinks)

    def admit(self) -> Request:
        """A new request without tokens."""
        return Request(self._free_rows.pop())

    def finish(self, sequence: Request) -> None:
        """Give all its pages back."""
        self._poison(sequence.pages)
        self.allocator.release(sequence.pages)
        self._free_rows.append(sequence.row)
        sequence.pages = []

    def step(
        self,
        new: Mapping[Request, int],
        *,
        mode: str = "extend",
        tree: Mapping[Request, tuple[torch.Tensor, list[int]]] | None = None,
        keep: bool = True,
    ) -> float:
        """`new` tokens of each request through every layer; the largest error of `out` and LSE.

        `tree`: bool `[new, new]` among the drafts, and their depths; `keep` False: nothing is accepted.
        """
        opened = self.open(new, mode=mode, tree=tree)
        worst = self.run(opened, range(len(self.layers)))
        self.close(opened, keep=keep)
        return worst

    def open(
        self,
        new: Mapping[Request, int],
        *,
        mode: str = "extend",
        tree: Mapping[Request, tuple[torch.Tensor, list[int]]] | None = None,
    ) -> Open:
        """A planned step none of whose layers ran yet."""
        batch = self._batch(new, mode, tree)
        eager = self.backend.init_forward_metadata
        self.plan = planned_in_buffers(self.backend, batch) if self._buffers else eager(batch)
        return Open(batch, self.plan, new, tree)

    def run(self, opened: Open, layers: Iterable[int]) -> float:
        """Some layers of a step; their largest error."""
        with anyattn.forward_context(self.backend, opened.plan):
            return max(self._run_layer(i, opened.batch, opened.new, opened.tree) for i in layers)

    def close(self, opened: Open, *, keep: bool = True) -> None:
        """After the last layer: its tokens count, window pages go."""
        for sequence, count in opened.new.items():
            sequence.length += count if keep else 0
            if isinstance(self.allocator, WindowAllocator) and self.evicting:
                self._evict(sequence)

    # -- one step ------------------------------------------------------------------------------------

    def _batch(
        self,
        new: Mapping[Request, int],
        mode: str,
        tree: Mapping[Request, tuple[torch.Tensor, list[int]]] | None,
    ) -> anyattn.ForwardBatch:
        page = self.pool.page_size
        slots: list[int] = []
        for sequence, count in new.items():
            self._grow(sequence, sequence.length + count)
            span = range(sequence.length, sequence.length + count)
            slots += [sequence.pages[t // page] * page + t % page for t in span]
        rows, prefix = [s.row for s in new], [s.length for s in new]
        lens = list(new.values())
        loc = VirtualIds(torch.tensor(slots)) if self.pool.ids is IdKind.VIRTUAL else slots
        if mode == "decode":
            seq = [p + n for p, n in zip(prefix, lens, strict=True)]
            return anyattn.ForwardBatch.decode(rows, seq, loc)
        if mode == "mixed":
            return anyattn.ForwardBatch.mixed(rows, prefix, lens, loc)
        if mode == "dllm_extend":
            mask = block_causal_mask(prefix, lens, self.block)
            extend = anyattn.ForwardBatch.extend
            return extend(rows, prefix, lens, loc, mode=anyattn.ForwardMode.DLLM_EXTEND, mask=mask)
        if tree is not None:
            masks, positions = [], []
            for sequence, count in new.items():
                cells, depths = tree[sequence]
                masks.append(torch.cat((torch.ones(count, sequence.length, dtype=torch.bool), cells), 1))
                positions += [sequence.length + d for d in depths]
            mask = anyattn.ExplicitMask.from_matrices(masks)
            return anyattn.ForwardBatch.verify(rows, prefix, lens, loc, mask=mask, positions=positions)
        return anyattn.ForwardBatch.extend(rows, prefix, lens, loc, mode=anyattn.ForwardMode(mode))

    def _grow(self, sequence: Request, tokens: int) -> None:
        page = self.pool.page_size
        fresh = self.allocator.allocate(max(0, pages_for(tokens, page) - len(sequence.pages)))
        sequence.pages += fresh
        if isinstance(self.allocator, WindowAllocator):
            self.allocator.cover(sequence.pages, sequence.length, tokens)
        held = torch.tensor(sequence.pages)[:, None] * page + torch.arange(page)
        self.table.req_to_token[sequence.row, : held.numel()] = held.flatten().to(self.table.req_to_token)
        for layer in range(len(self.specs)):  # the tail of an owned page is finite
            for own in self._own_pages(layer, sequence.pages[sequence.length // page :]):
                if bool(self.pool.key_cache(layer)[own].isnan().all()):
                    self._fill(layer, own, 0.0)

    def _fill(self, layer: int, own: int, value: float) -> None:
        self.pool.key_cache(layer)[own] = value
        self.pool.value_cache(layer)[own] = value

    def _own_pages(self, layer: int, pages: Sequence[int]) -> list[int]:
        slot_map = self.pool.slot_map(layer)
        if slot_map is None:
            return list(pages)
        first = slot_map[torch.tensor(list(pages), dtype=torch.int64) * self.pool.page_size]
        return [int(s) // self.pool.page_size for s in first if s >= 0]

    def _poison(self, pages: Sequence[int]) -> None:
        for layer in range(len(self.specs)):
            for own in self._own_pages(layer, pages):
                self._fill(layer, own, torch.nan)

    def _evict(self, sequence: Request) -> None:
        assert isinstance(self.allocator, WindowAllocator)
        kept = {i: self._own_pages(i, sequence.pages) for i in range(len(self.specs))}
        self.allocator.evict(sequence.pages, sequence.length)
        for layer, owned in kept.items():
            for own in set(owned) - set(self._own_pages(layer, sequence.pages)):
                self._fill(layer, own, torch.nan)

    def _run_layer(
        self,
        index: int,
        batch: anyattn.ForwardBatch,
        new: Mapping[Request, int],
        tree: Mapping[Request, tuple[torch.Tensor, list[int]]] | None,
    ) -> float:
        spec, tokens = self.specs[index], batch.num_tokens
        owner = index if spec.kv_shared_with is None else spec.kv_shared_with
        q = torch.randn(tokens, spec.num_q_heads, spec.head_dim, generator=self.generator)
        k = v = None
        if owner == index:
            k = torch.randn(tokens, spec.num_kv_heads, spec.head_dim, generator=self.generator)
            v = torch.randn(tokens, spec.num_kv_heads, spec.v_head_dim, generator=self.generator)
            self._remember(owner, new, k, v)
        device = self.pool.device
        got = self.layers[index](
            q.to(device), None if k is None else k.to(device), None if v is None else v.to(device), batch,
            return_lse=True,
        )  # fmt: skip
        diffusion = batch.forward_mode is anyattn.ForwardMode.DLLM_EXTEND
        return self._judge(index, owner, q, got, new, tree, diffusion=diffusion)

    def _remember(self, layer: int, new: Mapping[Request, int], k: torch.Tensor, v: torch.Tensor) -> None:
        offset = 0
        for sequence, count in new.items():
            for store, x in ((sequence.keys, k), (sequence.values, v)):
                room = store.setdefault(layer, torch.full((_MOST, *x.shape[1:]), torch.nan).double())
                room[sequence.length : sequence.length + count] = x[offset : offset + count].double()
            offset += count

    def _judge(
        self,
        index: int,
        owner: int,
        q: torch.Tensor,
        got: tuple[torch.Tensor, torch.Tensor],
        new: Mapping[Request, int],
        tree: Mapping[Request, tuple[torch.Tensor, list[int]]] | None,
        *,
        diffusion: bool,
    ) -> float:
        spec, worst, offset = self.specs[index], 0.0, 0
        for sequence, count in new.items():
            total, rows = sequence.length + count, slice(offset, offset + count)
            offset += count
            mask = positions = None
            if diffusion:
                ends = (torch.arange(sequence.length, total) // self.block + 1) * self.block
                mask = torch.arange(total)[None, :] < ends[:, None]
            if tree is not None:
                cells, depths = tree[sequence]
                mask = torch.cat((torch.ones(count, sequence.length, dtype=torch.bool), cells), 1)
                positions = [sequence.length + d for d in depths]
            request = oracle.OracleRequest(
                slots=range(total), num_queries=count, positions=positions, mask=mask
            )
            sinks = self.layers[index].sinks
            out, lse = oracle.attend(
                q[rows], sequence.keys[owner], sequence.values[owner], [request], scale=spec.scale,
                kind=spec.kind.value, window=spec.sliding_window, logit_cap=spec.logit_cap,
                sinks=None if sinks is None else sinks.cpu(),
            )  # fmt: skip
            worst = max(worst, oracle.relative_error(got[0][rows], out))
            worst = max(worst, oracle.relative_error(got[1][rows], lse, floor=1.0))
        return worst


def tree_of(count: int, rng: random.Random) -> tuple[torch.Tensor, list[int]]:
    """A random tree of draft tokens: bool `[count, count]` (ancestors and itself), and depths."""
    cells = torch.zeros(count, count, dtype=torch.bool)
    depths: list[int] = []
    for token in range(count):
        parent = rng.randrange(-1, token)
        if parent >= 0:
            cells[token] = cells[parent]
        cells[token, token] = True
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return cells, depths
