"""Steps launched before the tokens of the step before are known: the same texts, whatever ends or joins."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from test_random_model import prompts, random_checkpoint

from anyattn.core.batch import ForwardMode
from anyattn.core.kv.allocator import PageAllocator
from anyattn.core.kv.prefix import PrefixCache
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.inflight import InFlight
from anyattn.demo.model import LlamaModel
from anyattn.demo.request import GenerationRequest
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.scheduler import Scheduler

CONFIG = EngineConfig(max_batch=4, max_context=96, page_size=4, backend="torch_native", page_seed=3)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return LlamaModel(random_checkpoint(), max_context=128)


Texts = tuple[list[tuple[int, ...]], list[str], Engine]


def texts(
    model: LlamaModel, config: EngineConfig, params: list[SamplingParams], eos: int | None, seed: int
) -> Texts:
    """Answers and their ends; requests join at random steps."""
    engine, draw = Engine(model, config, eos_id=eos), random.Random(seed)
    waiting, requests = list(zip(prompts(0), params, strict=True)), []
    while waiting or engine.scheduler.busy:
        if waiting and (not engine.scheduler.busy or draw.random() < 0.3):
            requests.append(engine.add(*waiting.pop(0)))
        engine.step()
    done = [request.completion() for request in requests]
    return [c.ids for c in done], [c.reason for c in done], engine


def settings(count: int, draws: bool) -> list[SamplingParams]:
    kinds = [SamplingParams(max_new_tokens=5 + 3 * (i % 5), seed=i) for i in range(count)]
    return [replace(p, temperature=0.7) if draws and i % 3 == 2 else p for i, p in enumerate(kinds)]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("tokens", [None, 120])
def test_the_texts_are_the_same(model: LlamaModel, reuse: bool, draws: bool, tokens: int | None) -> None:
    config = replace(CONFIG, prefix_reuse=reuse, kv_tokens=tokens)
    params = settings(len(prompts(0)), draws)
    plain, reasons, _ = texts(model, replace(config, run_ahead=False), params, None, 0)
    eos = plain[1][2]  # ends some answers early: that step's successor was launched already
    for end in (None, eos):
        want = texts(model, replace(config, run_ahead=False), params, end, 1)
        got = texts(model, replace(config, run_ahead=True), params, end, 1)
        assert got[:2] == want[:2]
        assert got[2].cache.num_available == want[2].cache.num_available, "no page is lost"
    assert "eos" in want[1]
    assert set(reasons) == {"length"}


def test_most_decode_steps_are_launched_ahead(model: LlamaModel) -> None:
    engine = Engine(model, replace(CONFIG, run_ahead=True))
    for prompt in prompts(0)[:3]:
        engine.add(prompt, SamplingParams(max_new_tokens=20))
    ahead = 0
    while engine.scheduler.busy:
        engine.step()
        ahead += engine._ahead is not None
    assert ahead >= 15


def test_a_step_in_flight_outlives_the_last_answer(model: LlamaModel) -> None:
    """Its only request ended; the next one is served by the same engine, and says what it says alone."""
    first, second = prompts(0)[:2]
    alone = Engine(model, CONFIG).generate([second], SamplingParams(max_new_tokens=6))[0].ids
    text = Engine(model, CONFIG).generate([first], SamplingParams(max_new_tokens=8))[0].ids
    engine = Engine(model, replace(CONFIG, run_ahead=True), eos_id=text[3])
    engine.generate([first], SamplingParams(max_new_tokens=8))
    assert engine._ahead is not None
    answer = engine.generate([second], SamplingParams(max_new_tokens=6, ignore_eos=True))[0]
    assert answer.ids == alone


def test_tokens_are_counted_once(model: LlamaModel) -> None:
    text = Engine(model, CONFIG).generate([prompts(0)[0]], SamplingParams(max_new_tokens=8))[0].ids
    engine = Engine(model, replace(CONFIG, run_ahead=True), eos_id=text[3])
    (answer,) = engine.generate([prompts(0)[0]], SamplingParams(max_new_tokens=8))
    engine.step()  # the step that nobody waits for
    assert engine.stats.of(ForwardMode.DECODE).tokens == len(answer.ids) - 1


def scheduler_with(*wanted: SamplingParams, pages: int = 16) -> tuple[Scheduler, list[GenerationRequest]]:
    """Everybody prefilled, one decode step scheduled next."""
    scheduler = Scheduler(
        PrefixCache(PageAllocator(4 * pages, 4), enabled=False), max_requests=4, max_context=64, chunk=64
    )
    requests = [GenerationRequest([1, 2, 3], params) for params in wanted]
    for request in requests:
        scheduler.add(request)
    step = scheduler.schedule()
    scheduler.finish_step(step, dict.fromkeys(requests, 7))
    return scheduler, requests


def test_what_may_not_run_ahead() -> None:
    long, short = SamplingParams(max_new_tokens=9), SamplingParams(max_new_tokens=2)
    scheduler, requests = scheduler_with(long, long)
    step = scheduler.schedule()
    following = scheduler.schedule_ahead(step)
    assert following is not None
    assert [(c.start, c.stop) for c in following.decodes] == [(4, 5), (4, 5)]
    assert all(len(r.pages) == 2 for r in requests), "pages of the tokens to come"
    scheduler.add(GenerationRequest([1], long))
    assert scheduler.schedule_ahead(step) is None, "someone waits"

    scheduler, _ = scheduler_with(long, short)
    assert scheduler.schedule_ahead(scheduler.schedule()) is None, "one has all its tokens after this step"

    scheduler, _ = scheduler_with(long, replace(long, temperature=1.0))
    assert scheduler.schedule_ahead(scheduler.schedule()) is None, "draws"

    scheduler, requests = scheduler_with(long, long, pages=4)
    step = scheduler.schedule()
    held = [list(r.pages) for r in requests]
    scheduler.cache.allocate(scheduler.cache.num_available)
    assert scheduler.schedule_ahead(step) is None, "no pages"
    assert [r.pages for r in requests] == held, "nothing was taken"


def test_prefills_are_never_ahead() -> None:
    scheduler = Scheduler(
        PrefixCache(PageAllocator(64, 4), enabled=False), max_requests=4, max_context=64, chunk=2
    )
    scheduler.add(GenerationRequest([1, 2, 3], SamplingParams(max_new_tokens=9)))
    assert scheduler.schedule_ahead(scheduler.schedule()) is None


def test_waiting_gives_tokens_of_the_host() -> None:
    import torch

    flight = InFlight(Scheduler.schedule(scheduler_with()[0]), torch.tensor([3, 5]))
    assert flight.wait() == [3, 5]
