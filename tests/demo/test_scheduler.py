"""Scheduling against a fake model whose KV is a dictionary: every step checks what it would read.

The fake writes (position, hash of all tokens so far) to each slot and derives the next token from what it
reads back through the request's pages: a wrong slot, a page shared too early, a lost token change the text.
"""

from __future__ import annotations

import random

import pytest

from anyattn.core.batch import ForwardMode
from anyattn.core.kv.allocator import PageAllocator, slot_range
from anyattn.core.kv.prefix import PrefixCache
from anyattn.demo.request import GenerationRequest
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.scheduler import Scheduler, Step
from anyattn.errors import ConfigError, PoolError

VOCAB = 50


class FakeModel:
    """KV of one pool; `run` computes a step and returns the sampled tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.kv: dict[int, tuple[int, int]] = {}

    def run(self, step: Step) -> dict[GenerationRequest, int]:
        written: set[int] = set()
        for chunk in step.chunks:
            slots = chunk.slots(self.page_size)
            assert len(slots) == chunk.length
            assert min(slots) >= self.page_size, "page 0 is nobody's"
            assert not written & set(slots), "one slot written twice in a step"
            written |= set(slots)
            for offset, slot in enumerate(slots):
                position = chunk.start + offset
                self.kv[slot] = (position, prefix_hash(chunk.request.tokens[: position + 1]))
        return {c.request: self.next_token(c.request, c.stop) for c in step.chunks if c.samples}

    def next_token(self, request: GenerationRequest, stop: int) -> int:
        total = 0
        for position, slot in enumerate(slot_range(request.pages, 0, stop, self.page_size)):
            assert self.kv[slot] == (position, prefix_hash(request.tokens[: position + 1]))
            total = total * 31 + self.kv[slot][1]
        return total % VOCAB


def prefix_hash(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 1_000_003


def alone(prompt: list[int], count: int) -> list[int]:
    """What the fake model says to a prompt, without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        total = 0
        for n in range(1, len(tokens) + 1):
            total = total * 31 + prefix_hash(tokens[:n])
        tokens.append(total % VOCAB)
    return tokens[len(prompt) :]


def scheduler_of(pages: int, page: int = 4, **options: int | bool | None) -> Scheduler:
    reuse, seed = bool(options.pop("reuse", True)), options.pop("seed", 5)
    cache = PrefixCache(PageAllocator(pages * page, page, seed=seed), enabled=reuse)
    sizes = {"max_requests": 4, "max_context": 256, "chunk": 16} | options
    return Scheduler(cache, **sizes)  # type: ignore[arg-type]


def request_of(prompt: list[int], count: int = 6) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(max_new_tokens=count))


def drain(
    scheduler: Scheduler, requests: list[GenerationRequest], model: FakeModel | None = None
) -> list[Step]:
    """Run until everyone is done; the steps. `model` keeps its KV from one call to the next."""
    model, steps = model or FakeModel(scheduler.page_size), []
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        step = scheduler.schedule()
        assert step.chunks, "a busy scheduler always has something to compute"
        scheduler.finish_step(step, model.run(step))
        steps.append(step)
        assert len(steps) < 2000
    return steps


def prompts(count: int, seed: int, shared: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(shared)]
    return [[*head, *(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30)))] for _ in range(count)]


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 16, 400])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_text_depends_on_no_option(page: int, chunk: int, mixed: bool) -> None:
    requests = [request_of(p) for p in prompts(9, seed=chunk, shared=19)]
    scheduler = scheduler_of(400 // page, page, chunk=chunk, mixed=mixed)
    steps = drain(scheduler, requests)
    assert all(r.new_ids == alone(list(r.prompt_ids), 6) for r in requests)
    assert scheduler.cache.num_available == 400 // page  # every page came back
    assert all(sum(c.length for c in s.prefills) <= chunk for s in steps)
    assert all(c.length == 1 for s in steps for c in s.decodes)
    assert any(s.mode is ForwardMode.MIXED for s in steps) == mixed


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("pages", [13, 16, 24])
def test_a_small_pool_preempts_and_still_says_the_same(pages: int, reuse: bool) -> None:
    requests = [request_of(p, count=12) for p in prompts(8, seed=pages, shared=9)]
    scheduler = scheduler_of(pages, 4, reuse=reuse)
    drain(scheduler, requests)
    assert all(r.new_ids == alone(list(r.prompt_ids), 12) for r in requests)
    assert scheduler.cache.num_available == pages
    if pages == 13:
        assert scheduler.preemptions > 0
        assert scheduler.preemptions == sum(r.preemptions for r in requests)


def test_a_shared_prefix_is_computed_once() -> None:
    head = list(range(20))
    requests = [request_of([*head, 40 + i]) for i in range(4)]
    steps = drain(scheduler_of(60), requests)
    assert [r.reused_tokens for r in requests] == [0, 20, 20, 20]
    assert sum(c.length for s in steps for c in s.prefills) == 21 + 3


def test_without_reuse_everything_is_computed() -> None:
    requests = [request_of([*range(20), 40 + i]) for i in range(4)]
    steps = drain(scheduler_of(60, reuse=False), requests)
    assert [r.reused_tokens for r in requests] == [0] * 4
    assert sum(c.length for s in steps for c in s.prefills) == 84


def test_the_whole_prompt_cached_still_computes_its_last_token() -> None:
    scheduler, model = scheduler_of(60), FakeModel(4)
    first, again = request_of(list(range(16))), request_of(list(range(16)))
    drain(scheduler, [first], model)
    drain(scheduler, [again], model)
    assert again.reused_tokens == 12  # the last full page holds the token whose logits are wanted
    assert again.new_ids == first.new_ids


def test_an_answer_is_a_prefix_too() -> None:
    scheduler, model = scheduler_of(60), FakeModel(4)
    first = request_of(list(range(10)), count=8)
    drain(scheduler, [first], model)
    follow_up = request_of([*range(10), *first.new_ids, 3, 4])
    drain(scheduler, [follow_up], model)
    assert follow_up.reused_tokens == 16  # 17 tokens have KV: 10 + 8 - 1, four full pages
    assert follow_up.new_ids == alone(list(follow_up.prompt_ids), 6)


def test_others_start_while_one_waits_for_a_prefix() -> None:
    scheduler = scheduler_of(60, chunk=8)
    a, b, c = request_of([*range(20), 1]), request_of([*range(20), 2]), request_of([30, 31])
    for request in (a, b, c):
        scheduler.add(request)
    model = FakeModel(4)
    for _ in range(3):
        step = scheduler.schedule()
        scheduler.finish_step(step, model.run(step))
    assert c in scheduler.running  # not held up by b
    assert b in scheduler.waiting


def test_at_most_max_requests_run() -> None:
    scheduler = scheduler_of(200, max_requests=3)
    steps = drain(scheduler, [request_of([i, i, i]) for i in range(8)])
    assert max(len(s.chunks) for s in steps) == 3


def test_the_end_token_stops_and_is_kept() -> None:
    prompt = [7, 8, 9]
    text = alone(prompt, 6)
    scheduler = scheduler_of(60, eos_id=text[2])
    request = request_of(prompt)
    drain(scheduler, [request])
    assert request.completion().reason == "eos"
    assert request.new_ids == text[: text.index(text[2]) + 1]
    ignoring = GenerationRequest(prompt, SamplingParams(max_new_tokens=6, ignore_eos=True))
    drain(scheduler, [ignoring])
    assert (ignoring.completion().reason, len(ignoring.new_ids)) == ("length", 6)


def test_what_can_never_fit_is_refused_at_once() -> None:
    scheduler = scheduler_of(4, page=4, max_context=64)
    scheduler.add(request_of(list(range(11)), count=6))  # 16 KV tokens: exactly the pool
    with pytest.raises(PoolError, match="one request alone doesn't fit"):
        scheduler.add(request_of(list(range(12)), count=6))
    with pytest.raises(ConfigError, match="longer than the context"):
        scheduler.add(request_of(list(range(60)), count=6))
    with pytest.raises(ConfigError, match="without tokens"):
        scheduler.add(request_of([]))


def test_an_empty_scheduler_is_idle() -> None:
    assert scheduler_of(4).schedule().mode is ForwardMode.IDLE


@pytest.mark.parametrize("field", ["chunk", "max_requests"])
def test_sizes_below_one_are_errors(field: str) -> None:
    with pytest.raises(ConfigError):
        scheduler_of(4, **{field: 0})
