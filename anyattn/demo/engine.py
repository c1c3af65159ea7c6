"""The engine: a model, a backend on one pool, and a scheduler, stepped until every request is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.core.graph.objects import GraphPlatform
from anyattn.core.kv.allocator import PageAllocator, pages_for
from anyattn.core.kv.prefix import PrefixCache
from anyattn.core.select.decision import Decision
from anyattn.core.traits import MixedSupport
from anyattn.demo.decoder import Decoder
from anyattn.demo.graphs import use_graphs
from anyattn.demo.inflight import InFlight
from anyattn.demo.request import Chunk, Completion, GenerationRequest
from anyattn.demo.sampler import SamplingParams, choose
from anyattn.demo.scheduler import Scheduler, Step
from anyattn.errors import ConfigError

__all__ = ["Engine", "EngineConfig", "EngineStats", "ModeStats"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes and choices of an engine.

    Attributes:
        max_batch: most requests that run at once.
        max_context: most KV tokens of a request (None = what the model was trained for).
        chunk: most prefill tokens of a step (None = as many as there are).
        kv_tokens: size of the pool (None = `max_batch * max_context`).
        page_size, backend, prefill, decode: asked of `anyattn.select` (None = its choice).
        prefix_reuse: share full pages between requests with a common prefix.
        page_seed: hand pages out in a random order; nothing may depend on it.
        dual_pool: layers with a window get a smaller pool; their pages go as soon as no query sees them.
            Needs `prefix_reuse=False`: a cached prefix has lost them.
        draft_tokens: most tokens that a decode step verifies per request, the last one included (0 = no
            drafts; see `demo.speculative`).
        graphs: decode steps replay captured graphs: `auto` (on CUDA, where the backend can), `on`, `off`.
        run_ahead: launch a decode step before the tokens of the one before it are known on the host, so that
            the host's work hides behind the device's (None = where the device works beside the host). An
            answer's end is then seen a step late, and that step's token dropped; texts are the same.
    """

    max_batch: int = 8
    max_context: int | None = None
    chunk: int | None = None
    kv_tokens: int | None = None
    page_size: int | None = None
    backend: str | None = None
    prefill: str | None = None
    decode: str | None = None
    prefix_reuse: bool = True
    page_seed: int | None = None
    dual_pool: bool = False
    draft_tokens: int = 0
    graphs: str = "auto"
    run_ahead: bool | None = None


@dataclass
class ModeStats:
    """Steps of one mode: how many, their query tokens, their wall-clock seconds."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Query tokens a second; 0 without steps."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class EngineStats:
    """What an engine has done so far."""

    modes: dict[ForwardMode, ModeStats] = field(default_factory=dict)

    def of(self, *modes: ForwardMode) -> ModeStats:
        """Sum over modes."""
        parts = [self.modes[m] for m in modes if m in self.modes]
        return ModeStats(
            sum(p.steps for p in parts), sum(p.tokens for p in parts), sum(p.seconds for p in parts)
        )

    def book(self, mode: ForwardMode, tokens: int, seconds: float) -> None:
        """Add one step."""
        entry = self.modes.setdefault(mode, ModeStats())
        entry.steps += 1
        entry.tokens += tokens
        entry.seconds += seconds


class Engine:
    """Continuous batching over the package's public interface.

    Attributes:
        decision: what was selected and why. pool, table, backend: built from it.
        scheduler, cache: who runs, and which pages are shared. stats: steps so far.
        windows: keeps the maps of a dual pool, or None.
        graphs: the captured decode step, or None; `graphs_note` says in a line what limits it.

    Raises:
        SelectionError, ConfigError, PoolError: choices or sizes that can't be.
        GraphError: `graphs="on"`, and the backend or the device can't.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        eos_id: int | None = None,
        platform: GraphPlatform | None = None,
    ) -> None:
        """`platform`: captures and replays in place of the device's own graphs."""
        self.model, self.config = model, config
        longest = model.max_context if config.max_context is None else config.max_context
        chunk = config.max_batch * longest if config.chunk is None else config.chunk
        self.decision = _decide(model, config, chunk, longest)
        page = self.decision.kv.page_size
        context = pages_for(longest + config.draft_tokens, page) * page
        tokens = config.max_batch * context if config.kv_tokens is None else config.kv_tokens
        slots = pages_for(tokens, page) * page
        windows = _window_slots(model, config, page, chunk) if config.dual_pool else None
        self.pool = anyattn.kv.create_pool(self.decision, num_slots=slots, window_slots=windows)
        self.table = anyattn.kv.RequestTable(
            max_requests=config.max_batch, max_context=context, device=self.pool.device
        )
        self.backend = anyattn.create_backend(self.decision, self.pool, self.table)
        self.windows = (
            anyattn.kv.WindowAllocator(self.pool, seed=config.page_seed)
            if isinstance(self.pool, anyattn.kv.WindowPool)
            else None
        )
        allocator = self.windows or PageAllocator(slots, page, seed=config.page_seed)
        self.cache = PrefixCache(allocator, enabled=config.prefix_reuse)
        mixed = self.backend.traits(ForwardMode.MIXED).mixed is not MixedSupport.REFUSED
        self.scheduler = Scheduler(
            self.cache,
            max_requests=config.max_batch,
            max_context=longest,
            chunk=chunk,
            mixed=mixed,
            eos_id=eos_id,
        )
        most = anyattn.Limits(config.max_batch, config.max_batch, context)
        use = use_graphs(config.graphs, model, self.backend, most, platform)
        self.graphs, self.graphs_note = use.graphs, use.why
        self.stats = EngineStats()
        beside = model.device.type != "cpu"
        self._runs_ahead = beside if config.run_ahead is None else config.run_ahead
        self._ahead: InFlight | None = None

    def add(self, prompt_ids: Sequence[int], params: SamplingParams | None = None) -> GenerationRequest:
        """Queue a prompt. Raises as `Scheduler.add`."""
        request = GenerationRequest(list(prompt_ids), params or SamplingParams())
        self.scheduler.add(request)
        return request

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: Callable[[Step, list[GenerationRequest]], None] | None = None,
    ) -> list[Completion]:
        """Continue all prompts in one continuous batch; results in the order of the prompts.

        Args:
            params: one for all, or one each.
            on_step: called after each step with it and the requests that finished in it.
        """
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        requests = [self.add(p, s) for p, s in zip(prompts, each, strict=True)]
        while self.scheduler.busy:
            step, finished = self.step()
            if on_step is not None:
                on_step(step, finished)
        return [r.completion() for r in requests]

    def step(self) -> tuple[Step, list[GenerationRequest]]:
        """Finish one step (an idle one when nobody runs); the step and who finished in it.

        The next decode step may be launched already, while the device computes this one.
        """
        started = time.perf_counter()
        current, self._ahead = self._ahead or self._launch(self.scheduler.schedule()), None
        if self._runs_ahead:
            following = self.scheduler.schedule_ahead(current.step)
            if following is not None:
                self._ahead = self._launch(following, current.tokens)
        return self._finish(current, started)

    def _run(self, step: Step, started: float) -> tuple[Step, list[GenerationRequest]]:
        """Compute a scheduled step."""
        return self._finish(self._launch(step), started)

    def _launch(self, step: Step, tokens: torch.Tensor | None = None) -> InFlight:
        """Give a step to the device. `tokens [T]`: its input where the host doesn't know it yet."""
        self._list_pages(step.chunks)
        logits = self._compute(step, tokens)
        if self.windows is not None:
            for chunk in step.chunks:
                self.windows.evict(chunk.request.pages, chunk.stop)
        chunks = [c for c in step.chunks if c.samples]
        requests = [c.request for c in chunks]
        return InFlight(step, choose(logits, [r.params for r in requests], [r.generator for r in requests]))

    def _finish(self, flight: InFlight, started: float) -> tuple[Step, list[GenerationRequest]]:
        """Wait for a step's tokens and book them."""
        step = flight.step
        computed = sum(c.length for c in step.chunks if c.request.row >= 0)
        tokens = flight.wait()
        sampling = [c.request for c in step.chunks if c.samples]
        finished = self.scheduler.finish_step(step, dict(zip(sampling, tokens, strict=True)))
        self.stats.book(step.mode, computed, time.perf_counter() - started)
        return step, finished

    def _compute(self, step: Step, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Plan the step once, run all layers, return the logits of the rows that are sampled."""
        batch = self._batch(step)
        ids = tokens
        if ids is None:
            ids = torch.tensor([t for c in step.chunks for t in c.token_ids], dtype=torch.int64)
        if self.graphs is not None and step.mode is ForwardMode.DECODE:
            return self.graphs.logits(batch, ids)
        plan = self.backend.init_forward_metadata(batch)
        rows, last = [], -1
        for chunk in step.chunks:
            last += chunk.length
            if chunk.samples:
                rows.append(last)
        device = self.model.device
        with anyattn.forward_context(self.backend, plan):
            return self.model.forward(
                ids.to(device, non_blocking=True),
                plan.positions,
                batch,
                torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
            )

    def _batch(self, step: Step) -> anyattn.ForwardBatch:
        page, chunks = self.pool.page_size, step.chunks
        rows = [c.request.row for c in chunks]
        slots = [slot for c in chunks for slot in c.slots(page)]
        if step.mode is ForwardMode.IDLE:
            return anyattn.ForwardBatch.idle()
        if step.mode is ForwardMode.DECODE:
            return anyattn.ForwardBatch.decode(rows, [c.stop for c in chunks], slots)
        starts, lengths = [c.start for c in chunks], [c.length for c in chunks]
        if step.mode is ForwardMode.EXTEND:
            return anyattn.ForwardBatch.extend(rows, starts, lengths, slots)
        return anyattn.ForwardBatch.mixed(rows, starts, lengths, slots, num_decode=len(step.decodes))

    def _list_pages(self, chunks: Sequence[Chunk]) -> None:
        """Enter pages that requests got since their last step into their rows of the request table.

        In one copy that waits for nothing: the device may still compute the step before.
        """
        page, rows, columns, pages = self.pool.page_size, [], [], []
        for chunk in chunks:
            request = chunk.request
            if self.windows is not None:
                self.windows.cover(request.pages, chunk.start, chunk.stop)
            for index in range(request.listed, len(request.pages)):
                rows.append(request.row)
                columns.append(index * page)
                pages.append(request.pages[index] * page)
            request.listed = len(request.pages)
        if rows:
            table = self.table.req_to_token
            entries = torch.tensor([rows, columns, pages]).to(table.device, non_blocking=True)
            within = torch.arange(page, device=table.device)
            table[entries[0, :, None], entries[1, :, None] + within] = (entries[2, :, None] + within).to(
                table
            )


def _window_slots(model: Decoder, config: EngineConfig, page: int, chunk: int) -> dict[int, int]:
    """Slots of each window size's pool that suffice for every step of this engine."""
    if config.prefix_reuse:
        raise ConfigError(
            "a dual pool gives up window KV that a shared prefix would need",
            asked="prefix_reuse=True",
            allowed="prefix_reuse=False",
            hint="EngineConfig(dual_pool=True, prefix_reuse=False)",
        )
    sizes = {s.sliding_window for s in model.specs if s.sliding_window is not None}
    tokens = chunk + config.max_batch
    return {w: anyattn.kv.window_slots_for(w, page, config.max_batch, tokens) for w in sorted(sizes)}


def _decide(model: Decoder, config: EngineConfig, chunk: int, longest: int) -> Decision:
    tokens = config.max_batch * max(1, config.draft_tokens)
    limits = anyattn.Limits(
        config.max_batch, max(chunk, 1) + tokens, longest + config.draft_tokens, config.draft_tokens
    )
    return anyattn.select(
        list(model.specs),
        dtype=model.dtype,
        device=str(model.device),
        limits=limits,
        page_size=config.page_size,
        backend=config.backend,
        prefill=config.prefill,
        decode=config.decode,
    )
