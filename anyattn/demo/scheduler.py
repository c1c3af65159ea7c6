"""Continuous batching: who computes what in the next step. Lists and numbers only; no tensor, no model.

Running requests decode in every step; prefill chunks share a token budget, first come, first served. A
request is admitted when the pages for all its known tokens are there, so a prefill never stops half-way. A
decode that finds no page preempts the youngest running request, which starts over later (often from cached
pages).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from anyattn.core.batch import ForwardMode
from anyattn.core.kv.allocator import pages_for
from anyattn.core.kv.prefix import PrefixCache, extend_keys
from anyattn.demo.request import Chunk, GenerationRequest
from anyattn.errors import ConfigError, PoolError

__all__ = ["Scheduler", "Step"]


@dataclass
class Step:
    """One step: prefill chunks, then decode rows (one token each)."""

    prefills: list[Chunk] = field(default_factory=list)
    decodes: list[Chunk] = field(default_factory=list)

    @property
    def chunks(self) -> list[Chunk]:
        """All rows in batch order."""
        return [*self.prefills, *self.decodes]

    @property
    def mode(self) -> ForwardMode:
        """EXTEND, DECODE, MIXED or IDLE."""
        if not self.prefills:
            return ForwardMode.DECODE if self.decodes else ForwardMode.IDLE
        return ForwardMode.MIXED if self.decodes else ForwardMode.EXTEND


class Scheduler:
    """Waiting and running requests over one prefix cache.

    Args:
        cache: where pages come from.
        max_requests: rows of the request table; most requests of a step.
        max_context: columns of the request table.
        chunk: most prefill tokens of a step, all requests together.
        mixed: prefill and decode may share a step; otherwise prefill steps go first.
        eos_id: token that ends an answer.

    Attributes:
        preemptions: how often a running request gave up its pages.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_requests: int,
        max_context: int,
        chunk: int,
        mixed: bool = True,
        eos_id: int | None = None,
    ) -> None:
        for name, value in (("chunk", chunk), ("max_requests", max_requests)):
            if value < 1:
                raise ConfigError(f"{name} of the scheduler", asked=value, allowed=">= 1")
        self.cache, self.page_size = cache, cache.allocator.page_size
        self.max_context, self.chunk, self.mixed, self.eos_id = max_context, chunk, mixed, eos_id
        self.waiting: deque[GenerationRequest] = deque()
        self.running: list[GenerationRequest] = []  # oldest admission first
        self.preemptions = 0
        self._rows = list(range(max_requests - 1, -1, -1))

    @property
    def busy(self) -> bool:
        """True while anyone waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            ConfigError: an empty prompt, or a request that could outgrow the table's context.
            PoolError: a request that could not finish even with the whole pool to itself.
        """
        if not request.prompt_ids:
            raise ConfigError("a prompt without tokens", asked="''", allowed="at least one token")
        most = request.most_kv_tokens
        if most > self.max_context:
            raise ConfigError(
                "prompt and answer are longer than the context",
                asked=f"{len(request.prompt_ids)} + {request.params.max_new_tokens} tokens",
                allowed=f"{self.max_context} KV tokens",
                hint="shorten the prompt, ask for fewer new tokens, or raise the context",
            )
        needed, pages = pages_for(most, self.page_size), self.cache.allocator.num_pages
        if needed > pages:
            raise PoolError(
                "one request alone doesn't fit into the KV pool",
                asked=f"{most} tokens = {needed} pages of {self.page_size}",
                allowed=f"{pages} pages",
                hint="make the pool larger, shorten the prompt or ask for fewer new tokens",
            )
        self.waiting.append(request)

    def schedule(self) -> Step:
        """The next step; empty when nobody runs or waits. Pages of its tokens are allocated."""
        step = Step()
        prefill_waits = any(r.prefilling for r in self.running)
        if self.mixed or not prefill_waits:
            self._schedule_decodes(step)
        budget = self._schedule_prefills(step, self.chunk)
        self._admit(step, budget)
        if step.prefills and step.decodes and not self.mixed:
            step.decodes.clear()  # one kind a step; their pages stay for the next one
        return step

    def schedule_ahead(self, step: Step) -> Step | None:
        """The step after a decode `step` whose tokens are not known yet: one more token for each request.

        None where it may not be that: someone waits or is about to have all tokens, draws are not greedy (a
        request's generator is drawn from once a step it takes part in), or pages are short.
        """
        requests = [chunk.request for chunk in step.decodes]
        if step.mode is not ForwardMode.DECODE or self.waiting or len(requests) != len(self.running):
            return None
        if not all(
            r.row >= 0 and r.params.greedy and r.num_new + 1 < r.params.max_new_tokens for r in requests
        ):
            return None
        missing = [max(0, pages_for(c.stop + 1, self.page_size) - len(c.request.pages)) for c in step.decodes]
        if sum(missing) > self.cache.num_available:
            return None
        for request, count in zip(requests, missing, strict=True):
            request.pages += self.cache.allocate(count)
        return Step(decodes=[Chunk(c.request, c.stop, 1, True) for c in step.decodes])

    def finish_step(self, step: Step, sampled: Mapping[GenerationRequest, int]) -> list[GenerationRequest]:
        """Book a computed step: append sampled tokens, publish full pages, let finished requests go.

        Args:
            sampled: the next token of each request whose chunk `samples`.

        Returns:
            Requests that finished in this step.
        """
        finished: list[GenerationRequest] = []
        for chunk in step.chunks:
            request = chunk.request
            if request.row < 0:  # it ended in the step before, when this one was launched already
                continue
            request.computed = chunk.stop
            self._publish(request)
            if request not in sampled:
                continue
            request.prefilling = False
            request.tokens.append(sampled[request])
            request.reason = self._reason(request)
            if request.reason is not None:
                self._let_go(request)
                finished.append(request)
        return finished

    def _schedule_decodes(self, step: Step) -> None:
        for request in list(self.running):
            if request.prefilling or request.row < 0:  # row < 0: preempted by an older one just now
                continue
            if self._grow(request, request.computed + 1):
                step.decodes.append(Chunk.of(request, 1))

    def _grow(self, request: GenerationRequest, tokens: int) -> bool:
        """Pages for `tokens` tokens, preempting younger requests; False if this one was preempted itself."""
        missing = pages_for(tokens, self.page_size) - len(request.pages)
        while missing > self.cache.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.cache.allocate(max(missing, 0))
        return True

    def _preempt(self, request: GenerationRequest) -> None:
        self._let_go(request)
        request.computed, request.published, request.prefilling = 0, 0, True
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _let_go(self, request: GenerationRequest) -> None:
        self.running.remove(request)
        self.cache.release(request.pages)
        self._rows.append(request.row)
        request.pages, request.row, request.listed = [], -1, 0

    def _schedule_prefills(self, step: Step, budget: int) -> int:
        for request in self.running:
            if request.prefilling and budget > 0:
                budget = self._prefill(step, request, budget)
        return budget

    @staticmethod
    def _prefill(step: Step, request: GenerationRequest, budget: int) -> int:
        length = min(budget, len(request.tokens) - request.computed)
        step.prefills.append(Chunk.of(request, length))
        return budget - length

    def _admit(self, step: Step, budget: int) -> None:
        """Requests from the queue while rows, pages and budget last; one that would gain by waiting waits."""
        for request in list(self.waiting):
            if not self._rows or budget <= 0:
                return
            extend_keys(request.keys, request.tokens, self.page_size)
            if self._worth_waiting(request):
                continue
            if not self._take_pages(request):
                return
            self.waiting.remove(request)
            request.row = self._rows.pop()
            self.running.append(request)
            budget = self._prefill(step, request, budget)

    def _take_pages(self, request: GenerationRequest) -> bool:
        """Shared pages where there are some, fresh ones for the rest; False (and nothing taken) if too few.

        At least one token is computed anew: its logits are wanted. A page per running request is spared,
        or the newcomer would be preempted at once.
        """
        usable = (len(request.tokens) - 1) // self.page_size
        shared = self.cache.match(request.keys[:usable])
        missing = pages_for(len(request.tokens), self.page_size) - len(shared)
        if missing + len(self.running) > self.cache.num_available and self.running:
            self.cache.release(shared)
            return False
        request.pages = [*shared, *self.cache.allocate(missing)]
        request.computed = len(shared) * self.page_size
        request.published = len(shared)
        if request.reused_tokens is None:
            request.reused_tokens = request.computed
        return True

    def _worth_waiting(self, request: GenerationRequest) -> bool:
        """True if the first page that isn't cached yet is being computed by a running request right now."""
        if not self.cache.enabled:
            return False
        usable = (len(request.tokens) - 1) // self.page_size
        first = next((i for i, key in enumerate(request.keys[:usable]) if not self.cache.has(key)), None)
        if first is None:
            return False
        return any(
            other.prefilling and len(other.keys) > first and other.keys[first] == request.keys[first]
            for other in self.running
        )

    def _publish(self, request: GenerationRequest) -> None:
        """Offer the pages that this step filled."""
        extend_keys(request.keys, request.tokens, self.page_size)
        full = request.computed // self.page_size
        for index in range(request.published, full):
            self.cache.publish(request.keys[index], request.pages[index])
        request.published = max(request.published, full)

    def _reason(self, request: GenerationRequest) -> str | None:
        if request.tokens[-1] == self.eos_id and not request.params.ignore_eos:
            return "eos"
        return "length" if request.num_new >= request.params.max_new_tokens else None
