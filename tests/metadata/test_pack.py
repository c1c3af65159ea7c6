"""A step's vectors as one: what is taken is what the batch holds, and nothing wrong is found right."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from eager_steps import CONTEXT, PAGE, REQUESTS, Steps

from anyattn.core.batch import ForwardBatch
from anyattn.core.graph.buckets import GraphKey
from anyattn.core.graph.padding import Padder
from anyattn.core.metadata import pack as module
from anyattn.core.metadata.pack import Pack
from anyattn.errors import BatchError

LAST = PAGE + REQUESTS * CONTEXT - 1


@pytest.fixture
def steps() -> Steps:
    made = Steps()
    made.compiler.checks = "host"
    return made


def batch(rows: list[int], lens: list[int], loc: list[int] | None, **options: Any) -> ForwardBatch:
    return ForwardBatch.extend(rows, [n - 1 for n in lens], [1] * len(lens), loc, **options)


RIGHT = {
    "one": batch([0], [1], [PAGE]),
    "the last of all": batch([REQUESTS - 1, 0], [CONTEXT, 1], [LAST, PAGE]),
    "no slots": batch([0, 1], [3, 4], None),
    "positions": batch([0, 1], [3, 4], [9, 8], positions=[-5, 1 << 60]),
    "padding": batch([0, REQUESTS], [3, 1], [9, 0], num_padding_requests=1),
    "padding alone": batch([REQUESTS] * 2, [1, 1], [0, 0], num_padding_requests=2),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_taken_as_it_is(name: str, steps: Steps) -> None:
    given = RIGHT[name]
    for _ in range(2):
        pack = steps.compiler._packed(given)
        assert pack is not None
        fields = ("req_pool_indices", "seq_lens", "extend_seq_lens", "out_cache_loc", "positions")
        vectors = [v for v in (getattr(given, each) for each in fields) if v is not None]
        assert [each.tolist() for each in pack.views] == [each.tolist() for each in vectors]
        assert pack.wide.tolist() == torch.cat(vectors).tolist()


WRONG = {
    "row": batch([0, REQUESTS], [3, 4], [9, 8]),
    "negative row": batch([-1, 0], [3, 4], [9, 8]),
    "length": batch([0, 1], [CONTEXT + 1, 4], [9, 8]),
    "sink": batch([0, 1], [3, 4], [9, PAGE - 1]),
    "negative slot": batch([0, 1], [3, 4], [9, -9]),
    "beyond the pool": batch([0, 1], [3, 4], [LAST + 1, 9]),
    "far beyond": batch([0, 1], [3, 4], [1 << 62, 9]),
    "twice": batch([0, 1], [3, 4], [9, 9]),
    "too little padding": batch([0, REQUESTS, REQUESTS], [3, 1, 1], [9, 0, 0], num_padding_requests=1),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_with_the_reason(name: str, steps: Steps) -> None:
    wrong, right = WRONG[name], steps.batch(*[5] * WRONG[name].batch_size)
    for _ in range(2):
        assert steps.compiler._packed(wrong) is None
        with pytest.raises(BatchError):
            steps.compiler._check_host(wrong)
        assert steps.compiler._packed(right) is not None, "nothing of it is left"


def test_vectors_elsewhere_or_of_other_lengths_are_left_alone(steps: Steps) -> None:
    good = steps.batch(5, 9)
    for change in (
        {"seq_lens": good.seq_lens.to("meta")},
        {"out_cache_loc": torch.tensor([9])},
        {"extend_seq_lens": torch.ones(1, dtype=torch.int64), "positions": torch.zeros(3, dtype=torch.int64)},
    ):
        assert steps.compiler._packed(good.view(**change)) is None
    assert steps.compiler._packed(good) is not None


def test_lengths_that_the_batch_has_twice_are_checked_apart(steps: Steps) -> None:
    good, long = steps.batch(5, 9), steps.batch(5, 10)
    assert steps.compiler._packed(good.view(host_lens=long.host_lens)) is None


def test_a_plan_that_takes_a_pack_has_the_batchs_values(steps: Steps) -> None:
    for lens in ((5, 9), (6, 10), (1, CONTEXT)):
        steps.plan(steps.batch(*lens))
    assert len(steps.compiler._packs) == 1
    for count in range(1, REQUESTS):
        for _ in range(2):
            steps.plan(steps.batch(*[3] * count))
    assert len(steps.compiler._packs) == REQUESTS - 1


def test_only_so_many_are_kept(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 3)
    for count in (*range(1, REQUESTS), *range(1, REQUESTS)):
        for _ in range(2):
            steps.plan(steps.batch(*[3] * count))
        assert 1 <= len(steps.compiler._packs) <= 3


def test_two_threads_have_packs_of_their_own(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has taken its vectors and is looked at when the other takes its own, of the same shape."""
    steps.plan(steps.batch(5, 9))
    first, second = steps.batch(6, 10), steps.batch(7, 11)
    right, others = Pack.right, list[Any]()

    def slowly(pack: Pack, wide: Any) -> bool:
        if threading.current_thread() is threading.main_thread() and not others:
            other = threading.Thread(target=lambda: others.append(steps.compiler._packed(second)))
            other.start()
            other.join()
        return right(pack, wide)

    monkeypatch.setattr(Pack, "right", slowly)
    mine = steps.compiler._packed(first)
    assert mine is not None
    assert mine.views[1].tolist() == [6, 10]
    assert others[0].views[1].tolist() == [7, 11]


def test_a_decode_batch_lies_side_by_side(steps: Steps) -> None:
    rows, loc = torch.tensor([3, 1]), torch.tensor([9, 8])
    made = ForwardBatch.decode(rows, [5, 9], loc, positions=[4, 8])
    assert made.whole.tolist() == [3, 1, 5, 9, 1, 1, 9, 8, 4, 8]
    rows[0], loc[0] = 7, 7
    assert (made.req_pool_indices.tolist(), made.out_cache_loc.tolist()) == ([3, 1], [9, 8]), "a copy"
    made.seq_lens[1] = CONTEXT + 1
    assert made.whole[3] == CONTEXT + 1, "the same memory"
    assert steps.compiler._packed(made) is None, "what is uploaded is what was looked at"


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))],
    ids=["shallow", "deep", "pickled"],
)
def test_a_copy_says_what_its_own_vectors_hold(
    copied: Callable[[ForwardBatch], ForwardBatch], steps: Steps
) -> None:
    made = copied(ForwardBatch.decode([3, 1], [5, 9], [9, 8]))
    made.seq_lens[1] = 10
    padder = Padder(GraphKey(made.forward_mode, 3, 1), steps.table, 1)
    assert padder.pad(made, None).seq_lens.tolist() == [5, 10, 1]  # type: ignore[arg-type]
    pack = steps.compiler._packed(made)
    assert pack is not None
    assert pack.wide.tolist() == [3, 1, 5, 10, 1, 1, 9, 8]
    assert made.exact is not None
    assert made.exact.seq_lens is made.seq_lens


@pytest.mark.parametrize("missing", ["a device", "numpy"])
def test_a_decode_batch_that_is_not_looked_at_as_one_is_a_copy(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, lens, positions = torch.tensor([3, 1]), torch.tensor([5, 9]), torch.tensor([4, 8])
    loc = torch.tensor([9, 8], device="meta" if missing == "a device" else "cpu")
    if missing == "numpy":
        monkeypatch.setattr(torch.Tensor, "numpy", _no_numpy)
    made = ForwardBatch.decode(rows, lens, loc, positions=positions)
    assert made.whole is None
    for given in (rows, lens, positions, loc):
        given.fill_(7)
    found = (made.req_pool_indices, made.seq_lens, made.positions)
    assert [x is not None and x.tolist() for x in found] == [[3, 1], [5, 9], [4, 8]]
    assert made.out_cache_loc is not None
    assert made.out_cache_loc.is_meta or made.out_cache_loc.tolist() == [9, 8]


def _no_numpy(tensor: torch.Tensor) -> None:
    raise RuntimeError("Numpy is not available")


def test_a_copy_with_other_fields_is_another_batch(steps: Steps) -> None:
    made = steps.batch(5, 9)
    other = dataclasses.replace(made, seq_lens=torch.tensor([6, 9]), host_lens=None)
    assert other.serial != made.serial
    assert other.whole is None
    assert steps.plan(other).key.serial == other.serial


@pytest.mark.parametrize("name", ["req_pool_indices", "seq_lens", "extend_seq_lens", "out_cache_loc"])
def test_a_batch_with_another_field_lies_elsewhere(name: str, steps: Steps) -> None:
    made = steps.batch(5, 9)
    other = made.view(**{name: torch.tensor([6, 7])})
    assert made.view(captured_mode=made.forward_mode).whole is made.whole
    assert other.whole is None
    assert made.view(positions=torch.tensor([4, 8])).whole is None
    if name == "out_cache_loc":
        pack = steps.compiler._packed(other)
        assert pack is not None
        assert pack.views[3].tolist() == [6, 7]
        assert pack.wide.tolist()[-2:] == [6, 7]


def test_a_pack_serves_batches_that_lie_either_way(steps: Steps) -> None:
    for lens in ((5, 9), (6, 10), (7, 11)):
        whole, other = steps.batch(*lens), steps.batch(*lens[::-1])
        apart = whole.view(seq_lens=other.seq_lens, host_lens=None)
        for each in (whole, apart, whole):
            pack = steps.compiler._packed(each)
            assert pack is not None
            assert pack.views[1].tolist() == each.seq_lens.tolist()
            assert pack.wide.tolist() == torch.cat(pack.views).tolist()
            steps.compiler._packs.give_back(pack)
    assert len(steps.compiler._packs) == 1


def test_padded_decode_rows_have_a_token() -> None:
    made = ForwardBatch.decode([0, REQUESTS], [5, 0], [9, 0], num_padding_requests=1)
    assert made.seq_lens.tolist() == [5, 1]
    assert (made.num_tokens, made.num_padding_tokens) == (2, 1)
    with pytest.raises(BatchError, match="seq_lens"):
        ForwardBatch.decode([0, 1], [5, 0], [9, 8])
    with pytest.raises(BatchError, match="integers"):
        ForwardBatch.decode([0, 1], [5, 1.5], [9, 8])  # type: ignore[list-item]
    with pytest.raises(BatchError, match="integers"):
        ForwardBatch.decode([0, 1 << 70], [5, 1], [9, 8])
