"""The engine on the real model: token for token the reference's text, whatever the batching."""

from __future__ import annotations

import gc
import itertools
import os

import pytest
import torch
from demo_reference import Case, assert_agrees, cases
from demo_server import Server

from anyattn.core.batch import ForwardMode
from anyattn.demo.engine import Engine
from anyattn.demo.model import LlamaModel
from anyattn.demo.request import Completion
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.tokenizer import Tokenizer
from anyattn.demo.weights import Checkpoint, find_gguf
from anyattn.errors import AnyattnError, ConfigError, PoolError, UnknownNameError

pytestmark = pytest.mark.model
CASES = cases()
PARIS = [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]


def served(server: Server, count: int, label: str, **options: object) -> tuple[list[Completion], Engine]:
    """All reference prompts in one batch; their texts agree."""
    found, engine = server.generate([c.prompt_ids for c in CASES], count, **options)
    for case, completion in zip(CASES, found, strict=True):
        assert len(completion.ids) == min(count, len(case.ids))
        assert_agrees(case, completion.ids, label)
    return found, engine


def test_the_capital_of_france(server: Server, tokenizer: Tokenizer) -> None:
    (answer,), _ = server.generate([tokenizer.encode("The capital of France is")], 20)
    assert list(answer.ids) == PARIS


@pytest.mark.parametrize("case", CASES, ids=[str(i) for i in range(len(CASES))])
def test_alone(server: Server, case: Case) -> None:
    (answer,), _ = server.generate([case.prompt_ids], 12)
    assert_agrees(case, answer.ids, "alone")


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_one_mixed_batch_with_any_page(server: Server, page_size: int) -> None:
    options = {"page_size": page_size, "chunk": 64, "page_seed": page_size}
    found, engine = served(server, 32, f"page {page_size}", **options)
    assert engine.stats.of(ForwardMode.MIXED).steps > 0
    pairs = zip(CASES[5].prompt_ids, CASES[6].prompt_ids, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert found[6].reused_tokens == shared // page_size * page_size > 0
    computed = engine.stats.of(*ForwardMode).tokens
    known = sum(len(c.prompt_ids) + len(c.ids) - 1 for c in found)  # the last token is never an input
    assert computed == known - sum(c.reused_tokens for c in found)


@pytest.mark.parametrize("chunk", [7, None])
def test_any_chunk_size(server: Server, chunk: int | None) -> None:
    served(server, 8, f"chunk {chunk}", chunk=chunk)


def test_one_token_at_a_time(server: Server) -> None:
    short = [c for c in CASES if len(c.prompt_ids) < 20]
    found, engine = server.generate([c.prompt_ids for c in short], 8, chunk=1)
    for case, completion in zip(short, found, strict=True):
        assert_agrees(case, completion.ids, "chunk 1")
    assert engine.stats.of(ForwardMode.MIXED).steps > 0


def test_fewer_rows_than_requests(server: Server) -> None:
    _, engine = served(server, 8, "two rows", max_batch=2, chunk=32)
    assert engine.cache.num_available == engine.cache.allocator.num_pages


def test_a_pool_that_is_too_small_for_all_preempts(server: Server) -> None:
    short = CASES[:5]
    found, engine = server.generate([c.prompt_ids for c in short], 32, kv_tokens=64, page_size=4)
    for case, completion in zip(short, found, strict=True):
        assert_agrees(case, completion.ids, "small pool")
    assert engine.scheduler.preemptions == sum(c.preemptions for c in found) > 0


def test_without_prefix_reuse_everything_is_computed(server: Server) -> None:
    _, engine = served(server, 4, "no reuse", prefix_reuse=False)
    computed = engine.stats.of(*ForwardMode).tokens - sum(min(4, len(c.ids)) - 1 for c in CASES)
    assert computed == sum(len(c.prompt_ids) for c in CASES)


def test_a_second_round_finds_the_first_ones_pages(server: Server) -> None:
    engine = server.engine()
    params = SamplingParams(max_new_tokens=4)
    for expected in (0, 112):
        (answer,) = engine.generate([CASES[5].prompt_ids], params)
        assert answer.reused_tokens == expected
        assert_agrees(CASES[5], answer.ids, "second round")


def test_sampling_repeats_with_its_seed_whoever_else_is_there(server: Server) -> None:
    params = SamplingParams(max_new_tokens=10, temperature=0.9, top_p=0.95, seed=7)
    alone = server.engine().generate([CASES[1].prompt_ids], params)[0]
    others = [SamplingParams(max_new_tokens=10), params, SamplingParams(max_new_tokens=10, temperature=1.3)]
    batched = server.engine().generate([c.prompt_ids for c in CASES[:3]], others)
    assert batched[1].ids == alone.ids
    assert_agrees(CASES[0], batched[0].ids, "beside sampled ones")
    other = SamplingParams(max_new_tokens=10, temperature=0.9, top_p=0.95, seed=8)
    assert server.engine().generate([CASES[1].prompt_ids], other)[0].ids != alone.ids


def test_an_engine_with_nothing_to_do_is_idle(server: Server) -> None:
    engine = server.engine()
    step, finished = engine.step()
    assert (step.mode, finished) == (ForwardMode.IDLE, [])
    (answer,) = engine.generate([CASES[0].prompt_ids], SamplingParams(max_new_tokens=5))
    assert list(answer.ids) == PARIS[:5]


def test_what_cannot_be_served_is_refused(server: Server) -> None:
    with pytest.raises(PoolError, match="one request alone doesn't fit"):
        server.generate([CASES[5].prompt_ids], 32, kv_tokens=64)
    with pytest.raises(ConfigError, match="longer than the context"):
        server.generate([CASES[5].prompt_ids], 200)
    with pytest.raises(ConfigError, match="without tokens"):
        server.generate([[]], 4)
    with pytest.raises(ConfigError, match="chunk"):
        server.generate([[1]], 4, chunk=0)
    with pytest.raises(UnknownNameError, match="torch_native"):
        server.generate([[1]], 4, backend="torch_natve")
    for impossible in ({"page_size": 0}, {"max_batch": 0}, {"kv_tokens": 0}, {"max_context": 0}):
        with pytest.raises(AnyattnError):
            server.generate([[1]], 4, **impossible)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_say_something_near(
    checkpoint: Checkpoint, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Rounding may turn a close step; the first tokens are far apart."""
    served = Server(LlamaModel(checkpoint, dtype=dtype, max_context=128), tokenizer.eos_id)
    (answer,), engine = served.generate([CASES[0].prompt_ids], 8, max_context=64)
    assert list(answer.ids) == PARIS[:8]
    assert engine.pool.dtype is dtype


def test_against_transformers_live(server: Server, tokenizer: Tokenizer) -> None:
    """A prompt that is in no file, on the very weights that transformers loads."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    path = find_gguf()
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    ids = tokenizer.encode("Water boils at 100 degrees, and freezes at")
    with torch.inference_mode():
        output = reference.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
        logits = reference(output[:, :-1]).logits[0, len(ids) - 1 :]
    del reference
    gc.collect()
    expected = output[0, len(ids) :].tolist()
    best = logits.topk(2).values
    (answer,), _ = server.generate([ids], 16, chunk=5)
    for step, (got, want) in enumerate(zip(answer.ids, expected, strict=True)):
        if got != want:
            assert best[step, 0] - best[step, 1] < 2e-3
            break
