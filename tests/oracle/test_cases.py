"""Cases: reproducible from their text, valid, and at the edges."""

from __future__ import annotations

import random

import pytest

from anyattn.errors import ConfigError
from anyattn.testing.cases import Case, CaseSpace, random_case, random_cases

CASES = list(random_cases(7, 1500))


def test_repr_is_one_line_that_gives_the_case_back() -> None:
    for case in CASES[:300]:
        text = repr(case)
        assert "\n" not in text
        assert eval(text, {"Case": Case}) == case
    assert repr(Case(prefix_lens=(3,), extend_lens=(2,))) == "Case(prefix_lens=(3,), extend_lens=(2,))"


def test_same_seed_same_cases_and_each_stands_alone() -> None:
    again = list(random_cases(7, 20))
    assert again == CASES[:20]
    assert random_case(random.Random("7/13")) == CASES[13]
    assert list(random_cases(8, 20)) != again


def test_every_value_of_the_space_comes_up() -> None:
    space = CaseSpace()
    for name, values in (
        ("mode", space.modes),
        ("kind", space.kinds),
        ("page_size", space.pages),
        ("layout", space.layouts),
        ("slot_layout", space.slot_layouts),
        ("window", space.windows),
        ("logit_cap", space.caps),
        ("mask", space.masks),
        ("batch_size", range(1, 7)),
        ("padding", space.paddings),
    ):
        assert {getattr(c, name) for c in CASES} == set(values), name


def test_lengths_hit_page_and_window_edges() -> None:
    pages = {c.seq_lens[0] - c.page_size for c in CASES if c.page_size > 4}
    assert {-1, 0, 1} <= pages
    windows = {length - c.window for c in CASES if c.window for length in c.prefix_lens}
    assert {-1, 0, 1} <= windows
    assert max(windows) > 3 * 17
    assert any(0 in c.extend_lens and c.num_tokens for c in CASES)
    assert any(0 in c.prefix_lens and max(c.prefix_lens) for c in CASES)
    assert any(c.num_tokens == 0 for c in CASES)


def test_bounds_of_a_smaller_space_hold() -> None:
    space = CaseSpace(
        modes=("decode", "mixed"), kinds=("causal",), pages=(16,), max_requests=2, max_context=10
    )
    for case in random_cases(1, 100, space):
        assert case.mode in ("decode", "mixed")
        assert case.batch_size <= 2
        assert max(case.prefix_lens) <= 10
        assert max(case.extend_lens) <= space.max_extend
        assert case.mode != "mixed" or case.extend_lens[-case.num_decode :] == (1,) * case.num_decode


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prefix_lens": (1, 2)}, "one per request"),
        ({"prefix_lens": (), "extend_lens": ()}, "at least one"),
        ({"mode": "prefil"}, "mode"),
        ({"slot_layout": "shuffled"}, "did you mean 'shuffled_pages'"),
        ({"kv": "read"}, "kv of a case"),
        ({"mode": "decode", "extend_lens": (2,)}, "one new token"),
        ({"kind": "cross"}, "encoder_lens"),
        ({"encoder_lens": (3,)}, "encoder_lens"),
        ({"kind": "encoder_only", "prefix_lens": (1,)}, "no cache"),
    ],
)
def test_refuses_impossible_cases(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Case(**fields)


def test_no_mode_for_a_kind() -> None:
    with pytest.raises(ConfigError, match="encoder_only"):
        random_case(random.Random(0), CaseSpace(modes=("decode",), kinds=("encoder_only",)))
