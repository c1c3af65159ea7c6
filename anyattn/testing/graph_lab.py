"""A small served model under graphs: pool and requests, steps that fit a graph, and a verdict in float64."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import anyattn
from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.dtypes import torch_dtype
from anyattn.core.graph.buckets import Buckets
from anyattn.core.graph.objects import GraphPlatform
from anyattn.core.graph.runner import GraphRunner
from anyattn.core.kv.pools.mha import MHAPool
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.masks import VerifyMask
from anyattn.core.mla import MLAMethod, MLAPolicy
from anyattn.core.speculative.tree import Tree
from anyattn.core.traits import Traits, TreeMaskMode
from anyattn.testing import oracle
from anyattn.testing.graph_decide import decide_for
from anyattn.testing.graph_setup import GraphSetup

__all__ = ["TOLERANCES", "GraphLab", "GraphStep"]

TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest error (max |d| / max |ref| per request) by the model's dtype."""

_SPARE = 3  # pages that nobody owns, full of NaN


@dataclass(eq=False)
class GraphStep:
    """One step that fits the captured mode.

    Attributes:
        prefix: cached tokens by request. loc: slots of the new tokens. trees: one a request, or empty.
        inputs: q0, k0, v0, q1, … `[T, heads, size]` on the device.
    """

    rows: list[int]
    prefix: list[int]
    loc: list[int]
    trees: Sequence[Tree]
    batch: ForwardBatch
    inputs: dict[str, torch.Tensor]

    def __str__(self) -> str:
        return f"{len(self.rows)} requests on prefixes {self.prefix}"


class GraphLab:
    """Pool, table, backend and two layers of a `GraphSetup`. `runner()` makes a `GraphRunner` on them.

    Every row of the table owns `max_context` slots full of random KV, so that a step may have any length.
    What nobody owns is NaN, page 0 is zero.

    Args:
        platform: makes the graphs. host: decided for this emulated host.
    """

    def __init__(
        self, setup: GraphSetup, backend: str, device: str, platform: GraphPlatform, host: str | None = None,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.setup, self.platform, self.device = setup, platform, torch.device(device)
        sizes = setup.sizes
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = torch_dtype(sizes.dtype)
        self.requests = max(sizes.buckets) + 2
        self.limits = anyattn.Limits(
            max_requests=max(sizes.buckets),
            max_tokens=max(sizes.buckets) * setup.tokens,
            max_context=sizes.max_context,
            max_draft_tokens=setup.tokens if setup.mode is ForwardMode.TARGET_VERIFY else 0,
        )
        self.decision = decide_for(setup, backend, device, host, self.limits)
        pages = self.requests * -(-sizes.max_context // sizes.page_size)
        self.pool = anyattn.kv.create_pool(self.decision, num_slots=(pages + _SPARE) * sizes.page_size)
        self.table = anyattn.kv.RequestTable(
            max_requests=self.requests, max_context=sizes.max_context, device=self.device
        )
        self.backend = self.new_backend()
        self.layers = [self._layer(i) for i in range(2)]
        self.mask = None if setup.mask is None else self.new_mask(setup.mask)
        self._place(pages)
        self._fill()

    def new_backend(self) -> Any:
        """Another backend on the same pool and table."""
        policy: dict[str, Any] = (
            {"mla": MLAPolicy(method=MLAMethod.ABSORBED)} if self.setup.sizes.latent else {}
        )
        return anyattn.create_backend(self.decision, self.pool, self.table, **policy)

    def new_mask(self, form: TreeMaskMode) -> VerifyMask:
        """A tree mask for the largest step."""
        return VerifyMask.allocate(
            form, max_requests=self.limits.max_requests, draft_tokens=self.setup.tokens,
            max_context=self.limits.max_context, device=self.device,
        )  # fmt: skip

    def runner(self, *, early_tables: bool = False, capture: bool = True) -> GraphRunner:
        """A `GraphRunner` with static inputs of its own, captured unless told otherwise."""
        runner = GraphRunner(
            self.backend, self.body, self.platform, limits=self.limits, inputs=self._static(),
            buckets=Buckets(self.setup.sizes.buckets), early_tables=early_tables,
        )  # fmt: skip
        if capture:
            runner.capture(self.setup.mode, tokens_per_request=self.setup.tokens, mask=self.mask)
        return runner

    @property
    def traits(self) -> Traits:
        """Of the captured mode."""
        traits: Traits = self.backend.traits(self.setup.mode)
        return traits

    @property
    def serving(self) -> Any:
        """The backend that serves the captured mode."""
        return self.serving_of(self.backend)

    def serving_of(self, backend: Any) -> Any:
        """The child of a hybrid that serves the captured mode (a route's first), or the backend itself."""
        mode = self.setup.mode
        return backend.routed(mode, backend.routes(mode)[0])

    # -- the model -----------------------------------------------------------------------------------

    def body(self, batch: ForwardBatch, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both layers, each on inputs of its own: `{"out0": [T, Hq, Dv], "out1": …}`."""
        return {
            f"out{i}": layer(inputs[f"q{i}"], inputs[f"k{i}"], inputs.get(f"v{i}"), batch)
            for i, layer in enumerate(self.layers)
        }

    def _layer(self, index: int) -> anyattn.AttentionLayer:
        spec = self.setup.specs()[index]
        sinks = torch.randn(spec.num_q_heads, generator=self.generator) if spec.sinks else None
        return anyattn.AttentionLayer(spec, index, sinks=sinks).to(self.device)

    def _shapes(self) -> dict[str, tuple[int, int]]:
        found = {}
        for i, spec in enumerate(self.setup.specs()):
            found[f"q{i}"], found[f"k{i}"] = (
                (spec.num_q_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
            )  # fmt: skip
            if spec.mla is None:
                found[f"v{i}"] = (spec.num_kv_heads, spec.v_head_dim)
        return found

    def _static(self) -> dict[str, torch.Tensor]:
        rows = self.limits.max_tokens
        return {
            name: torch.zeros(rows, *shape, dtype=self.dtype, device=self.device)
            for name, shape in self._shapes().items()
        }

    def random(self, *shape: int) -> torch.Tensor:
        """Normal values in the model's dtype, on the CPU."""
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    # -- KV ------------------------------------------------------------------------------------------

    def _place(self, pages: int) -> None:
        page, each = self.setup.sizes.page_size, pages // self.requests
        order = list(range(1, pages + 1))
        self.rng.shuffle(order)
        slots = (torch.tensor(order)[:, None] * page + torch.arange(page)).view(self.requests, each * page)
        self.slots = slots[:, : self.setup.sizes.max_context]
        self.nobody = (pages + 1) * page
        self.write_table()

    def write_table(self, rows: Sequence[int] | None = None) -> None:
        """The slots of all requests (or of `rows`) into the request table."""
        chosen = list(range(self.requests)) if rows is None else list(rows)
        self.table.req_to_token[chosen] = self.slots[chosen].to(self.device, torch.int32)

    def _fill(self) -> None:
        specs, total = self.setup.specs(), self.pool.total_slots
        self.keys = [torch.full((total, s.num_kv_heads, s.head_dim), torch.nan).double() for s in specs]
        self.values = [torch.full((total, s.num_kv_heads, s.v_head_dim), torch.nan).double() for s in specs]
        owned = self.slots.flatten()
        for i, spec in enumerate(specs):
            self.spoil(i)
            shape = (owned.shape[0], spec.num_kv_heads)
            k = self.random(*shape, spec.head_dim)
            v = k[..., : spec.v_head_dim] if spec.mla else self.random(*shape, spec.v_head_dim)
            self.expect(i, owned, k, v)
            self.pool.write(i, owned.to(self.device), k.to(self.device), v.to(self.device))

    def spoil(self, layer: int, *, sink: bool = False) -> None:
        """NaN in all storage of `layer`, page 0 only if `sink`: tables of padded requests name it.

        Where the backend doesn't take NaN, only pages that nobody owns are NaN.
        """
        nan_tail = self.traits.tolerates_nan_tail
        for cache in self.caches(layer):
            cache.fill_(torch.nan)
            if not nan_tail:
                cache[:-_SPARE] = 0
            if not sink:
                cache[0] = 0

    def caches(self, layer: int) -> list[torch.Tensor]:
        """Storage of one layer, pages first."""
        pool = self.pool
        if isinstance(pool, MLAPool):
            return [pool.latent_cache(layer)]
        assert isinstance(pool, MHAPool)
        return [pool.key_cache(layer), pool.value_cache(layer)]

    def expect(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """From now on these values should stand at `slots`."""
        kv_dtype = self.pool.kv_dtype
        self.keys[layer][slots] = oracle.stored_values(k.cpu(), kv_dtype)
        self.values[layer][slots] = oracle.stored_values(v.cpu(), kv_dtype)

    # -- steps ---------------------------------------------------------------------------------------

    def draw(self, count: int, prefix: Sequence[int] | None = None, *, on_device: bool = False) -> GraphStep:
        """A step of `count` requests; `on_device`: its integers are tensors there."""
        rows = self.rng.sample(range(self.requests), count)
        return self.step(rows, [self._length() for _ in rows] if prefix is None else list(prefix), on_device)

    def _length(self) -> int:
        sizes, tokens, window = self.setup.sizes, self.setup.tokens, self.setup.window or 1
        most, page = sizes.max_context - tokens, sizes.page_size
        edges = [0, 1, page - 1, page, window - 1, window, most - 1, most]
        if self.rng.random() < 0.5:
            return min(most, self.rng.choice(edges))
        return self.rng.randint(0, most)

    def step(self, rows: list[int], prefix: list[int], on_device: bool = False) -> GraphStep:
        """The step of these requests; its trees are drawn, its mask is written by `fill_mask`."""
        tokens = self.setup.tokens
        loc = [int(s) for r, p in zip(rows, prefix, strict=True) for s in self.slots[r, p : p + tokens]]
        trees = [self._tree() for _ in rows] if self.mask is not None else []
        batch = self.make_batch(rows, prefix, loc, trees, on_device=on_device)
        inputs = {n: self.random(len(loc), *shape).to(self.device) for n, shape in self._shapes().items()}
        return GraphStep(rows, prefix, loc, trees, batch, inputs)

    def _tree(self) -> Tree:
        return Tree((-1, *(self.rng.randrange(i) for i in range(1, self.setup.tokens))))

    def make_batch(
        self, rows: Sequence[int], prefix: Sequence[int], loc: Sequence[int], trees: Sequence[Tree],
        *, padding: int = 0, on_device: bool = False,
    ) -> ForwardBatch:  # fmt: skip
        """The batch; the last `padding` requests stand for nobody."""
        tokens, mode = self.setup.tokens, self.setup.mode
        pads: dict[str, Any] = {"num_padding_requests": padding} if padding else {}
        new = [tokens] * len(rows)
        given: list[Any] = [list(rows), list(prefix), new, list(loc)]
        exact: dict[str, Any] = {}
        if on_device:
            seq = [p + tokens for p in prefix]
            exact = {"host_lens": anyattn.core.batch.Exact(torch.tensor(seq), torch.tensor(new))}
            given = [torch.tensor(x, dtype=torch.int64, device=self.device) for x in given]
            if padding and mode is not ForwardMode.DECODE:
                pads["num_padding_tokens"] = padding * tokens
        if mode is ForwardMode.DECODE:
            seq_lens = given[1] + 1 if on_device else [p + 1 for p in prefix]
            return ForwardBatch.decode(given[0], seq_lens, given[3], **exact, **pads)
        if self.mask is not None:
            exact["mask"] = self.mask
            at = [p for tree, start in zip(trees, prefix, strict=False) for p in tree.positions(start)]
            at += [0] * (len(loc) - len(at))
            exact["positions"] = torch.tensor(at, device=self.device) if on_device else at
        exact |= pads
        if mode is ForwardMode.TARGET_VERIFY:
            return ForwardBatch.verify(given[0], given[1], given[2], given[3], **exact)
        return ForwardBatch.extend(given[0], given[1], given[2], given[3], mode=mode, **exact)

    def fill_mask(self, step: GraphStep, mask: VerifyMask | None = None) -> None:
        """What a drafter does before a replay: the step's trees into the mask's buffer, in place."""
        mask = mask or self.mask
        if mask is None:
            return
        full = mask.mode is TreeMaskMode.FULL_MASK
        cells = [
            (tree.full_mask(p) if full else tree.mask()).flatten()
            for tree, p in zip(step.trees, step.prefix, strict=True)
        ]
        mask.buffer.zero_()
        if not cells:
            return
        packed = torch.cat(cells).to(mask.buffer)
        mask.buffer[: packed.shape[0]] = packed

    # -- verdicts ------------------------------------------------------------------------------------

    def expected(self, step: GraphStep) -> dict[str, torch.Tensor]:
        """The oracle's outputs, float64, by name; the step's KV is expected in storage from now on."""
        tokens, found = self.setup.tokens, {}
        slots = torch.tensor(step.loc)
        for i, (spec, layer) in enumerate(zip(self.setup.specs(), self.layers, strict=True)):
            k = step.inputs[f"k{i}"]
            self.expect(i, slots, k, k[..., : spec.v_head_dim] if spec.mla else step.inputs[f"v{i}"])
            requests = [
                oracle.OracleRequest(
                    slots=self.slots[row, : prefix + tokens].tolist(),
                    num_queries=tokens,
                    positions=step.trees[n].positions(prefix) if step.trees else None,
                    mask=step.trees[n].full_mask(prefix) if step.trees else None,
                )
                for n, (row, prefix) in enumerate(zip(step.rows, step.prefix, strict=True))
            ]
            sinks = None if layer.sinks is None else layer.sinks.detach().cpu()
            found[f"out{i}"], _ = oracle.attend(
                step.inputs[f"q{i}"].cpu(), self.keys[i], self.values[i], requests,
                scale=spec.scale, window=spec.sliding_window, sinks=sinks,
            )  # fmt: skip
        return found

    def error(self, step: GraphStep, got: Mapping[str, torch.Tensor]) -> float:
        """The largest relative error of a request."""
        tokens, worst = self.setup.tokens, 0.0
        for name, want in self.expected(step).items():
            for n in range(len(step.rows)):
                span = slice(n * tokens, (n + 1) * tokens)
                worst = max(worst, oracle.relative_error(got[name][span], want[span]))
        return worst

    @property
    def tolerance(self) -> float:
        """Of `error`."""
        return TOLERANCES[self.dtype]
