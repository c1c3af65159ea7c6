"""The engine with drafts says exactly what plain decoding says; needs the demo model, or a random one."""

from __future__ import annotations

import pytest
from demo_reference import assert_agrees, cases
from demo_server import Server
from test_random_model import assert_greedy, random_checkpoint  # type: ignore[import-not-found]

from anyattn.core.batch import ForwardMode
from anyattn.demo.engine import EngineConfig
from anyattn.demo.model import LlamaModel
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.speculative import SpeculativeEngine, make_engine
from anyattn.errors import ConfigError

CASES = cases()
PHRASE = [5, 17, 3, 44, 9, 60]
TEXTS = [[1, *PHRASE, 8, *PHRASE, 8, *PHRASE[:3]], [2, *PHRASE * 3, 7, 7], [90, 4], [*range(20, 60)]]


def engine(**options: object) -> SpeculativeEngine:
    config = {"max_batch": 4, "max_context": 96, "backend": "torch_native", "draft_tokens": 8} | options
    made = make_engine(LlamaModel(random_checkpoint()), EngineConfig(**config))  # type: ignore[arg-type]
    assert isinstance(made, SpeculativeEngine)
    return made


class Oracle:
    """A drafter that knows the answers, two steps of three, and puts wrong branches before right ones."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers, self.calls = answers, 0

    def draft(self, tokens: list[int], max_nodes: int, max_depth: int) -> object:
        from anyattn.core.speculative.tree import TreeBuilder

        made = TreeBuilder(tokens[-1], max_nodes)
        self.calls += 1
        for prompt, answer in self.answers.items():
            known = len(tokens) - len(prompt)
            if tuple(tokens[: len(prompt)]) == prompt and self.calls % 3 and max_depth > 0:
                right = answer[known : known + min(max_depth, 4)]
                made.add([96 - right[0], 1] if right else [])
                made.add([*right[:1], 95 - (right[1] if len(right) > 1 else 0)][:max_depth])
                made.add(right)
        return made


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_random_model_is_greedy_with_trees_that_are_partly_right(page_size: int) -> None:
    """Branches stand before the accepted ones, so KV must move; the next steps read it."""
    plain = make_engine(
        LlamaModel(random_checkpoint()), EngineConfig(max_batch=4, max_context=96, backend="torch_native")
    )
    params = SamplingParams(max_new_tokens=24)
    want = [c.ids for c in plain.generate(TEXTS, params)]
    drafted = engine(page_size=page_size, page_seed=3)
    answers = {tuple(text): list(ids) for text, ids in zip(TEXTS, want, strict=True)}
    drafted.drafter = Oracle(answers)  # type: ignore[assignment]
    found = drafted.generate(TEXTS, params)
    assert [c.ids for c in found] == want
    for text, completion in zip(TEXTS, found, strict=True):
        assert_greedy(text, completion.ids)
    stats = drafted.speculation
    assert stats.tokens_per_row > 1.5
    assert 0.2 < stats.acceptance < 1
    assert drafted.stats.of(ForwardMode.TARGET_VERIFY).steps == stats.steps > 0
    assert drafted.cache.num_available == drafted.cache.allocator.num_pages


def test_prompt_lookup_on_a_random_model() -> None:
    params = SamplingParams(max_new_tokens=20)
    drafted = engine(page_size=4)
    for text, completion in zip(TEXTS, drafted.generate(TEXTS, params), strict=True):
        assert len(completion.ids) == 20
        assert_greedy(text, completion.ids)
    assert drafted.speculation.drafted > 0


def test_sampled_text_is_the_same_too() -> None:
    """One draw per token that comes out, in order: the generator is where plain decoding has it."""
    params = SamplingParams(max_new_tokens=20, temperature=0.7, top_p=0.9, seed=3)
    config = EngineConfig(max_batch=4, max_context=96, backend="torch_native")
    want = [c.ids for c in make_engine(LlamaModel(random_checkpoint()), config).generate(TEXTS, params)]
    drafted = engine()
    assert [c.ids for c in drafted.generate(TEXTS, params)] == want
    assert drafted.speculation.steps > 0


def test_a_small_pool_and_fewer_rows_than_requests() -> None:
    """Drafts take only pages that nobody needs."""
    params = SamplingParams(max_new_tokens=24)
    drafted = engine(page_size=4, kv_tokens=96, max_batch=3, chunk=16)
    for text, completion in zip(TEXTS, drafted.generate(TEXTS, params), strict=True):
        assert_greedy(text, completion.ids)
    assert drafted.scheduler.preemptions > 0
    assert drafted.speculation.steps > 0


def test_engines_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="draft tokens of a step"):
        engine(draft_tokens=1)
    with pytest.raises(ConfigError, match="drafts with a dual pool"):
        engine(dual_pool=True)


@pytest.mark.model
@pytest.mark.parametrize("draft_tokens", [8])
def test_the_demo_model_says_the_reference_exactly(server: Server, draft_tokens: int) -> None:
    """All reference prompts in one batch, page 16, against transformers and against plain decoding."""
    prompts = [c.prompt_ids for c in CASES]
    options = {"max_context": 256, "page_size": 16, "backend": "torch_native", "chunk": 64}
    params = SamplingParams(max_new_tokens=32)
    made = [
        make_engine(server.model, EngineConfig(draft_tokens=n, **options), eos_id=server.eos_id)  # type: ignore[arg-type]
        for n in (0, draft_tokens)
    ]
    plain, drafted = (e.generate(prompts, params) for e in made)
    for case, a, b in zip(CASES, plain, drafted, strict=True):
        assert a.ids == b.ids
        assert a.reason == b.reason
        assert len(b.ids) == min(32, len(case.ids))
        assert_agrees(case, b.ids, "drafted")
    assert isinstance(made[1], SpeculativeEngine)
    stats = made[1].speculation
    assert stats.accepted > 0
    assert stats.rows < stats.tokens <= stats.rows + stats.accepted
