"""The Triton backend in the interpreter, judged by the oracle: small shapes, every feature."""

import dataclasses

import pytest
import torch

from anyattn.kernels.triton import attention
from anyattn.kernels.triton.launch import set_hook
from anyattn.testing.cases import Case, CaseSpace, random_cases
from anyattn.testing.interpreter import offer_triton
from anyattn.testing.judge import check_case

SPACE = CaseSpace(
    pages=(1, 4, 16, 64),
    heads=((1, 1), (2, 1), (3, 1), (4, 2), (2, 2)),
    head_dims=((16, 16), (32, 16), (48, 48), (64, 64)),
    kv_scales=(1.0, 0.5, 2.0),
    scales_per_head=True,
    max_requests=3,
    max_context=60,
    max_extend=20,
)
HALVES = dataclasses.replace(
    SPACE, dtypes=(("bfloat16", "bfloat16"), ("float16", "float16")), kinds=("causal",)
)


@pytest.fixture(autouse=True, scope="module")
def _on_this_cpu() -> None:
    offer_triton()


def judged(case: Case) -> None:
    report = check_case(case, backend="triton")
    assert report.passed, str(report)


@pytest.mark.parametrize("case", list(random_cases(7, 110, SPACE)), ids=lambda c: f"{c.mode}-{c.seed}")
def test_float32_cases(case: Case) -> None:
    judged(case)


@pytest.mark.parametrize("case", list(random_cases(11, 16, HALVES)), ids=lambda c: f"{c.dtype}-{c.seed}")
def test_half_precision_cases(case: Case) -> None:
    judged(case)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129])
def test_lengths_around_page_tile_and_split_edges(length: int) -> None:
    """Few programs and many units: short batches are split, so edges of splits are crossed too."""
    judged(
        Case(
            mode="decode", prefix_lens=(length - 1, 70), extend_lens=(1, 1), page_size=16, num_q_heads=2,
            head_dim=16, v_head_dim=16, slot_layout="shuffled_pages", sinks=True, seed=length,
        )
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 40])
def test_ranges_over_several_requests(window: int | None) -> None:
    """More requests than ranges: a program ends one request, does others and begins one that it leaves."""
    judged(
        Case(
            mode="decode", prefix_lens=(150, 1, 33, 130, 5, 0, 97, 64), extend_lens=(1,) * 8, page_size=16,
            num_q_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, slot_layout="shuffled_pages",
            sinks=True, window=window,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("lengths", "window"), [((300,), None), ((259,), 200), ((280, 290), None)])
def test_equal_parts(lengths: tuple[int, ...], window: int | None) -> None:
    """Requests that are sure to be about equally long: parts of each."""
    seen = []
    previous = set_hook(lambda kernel, grid, args, constexprs, options: bool(seen.append(constexprs)))
    try:
        judged(
            Case(
                mode="decode", prefix_lens=lengths, extend_lens=(1,) * len(lengths), page_size=16,
                num_q_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=16, slot_layout="shuffled_pages",
                sinks=True, window=window,
            )
        )  # fmt: skip
    finally:
        set_hook(previous)
    assert any(constexprs.get("WALK") is False and constexprs["SPLIT"] for constexprs in seen)


def test_groups_wider_than_a_program() -> None:
    judged(
        Case(mode="decode", prefix_lens=(40,), extend_lens=(1,), num_q_heads=72, head_dim=16, v_head_dim=16)
    )
    judged(Case(prefix_lens=(5,), extend_lens=(7,), num_q_heads=72, head_dim=16, v_head_dim=16))


def test_every_launch_goes_through_the_seam() -> None:
    seen = []
    previous = set_hook(lambda kernel, grid, args, constexprs, options: bool(seen.append(kernel.__name__)))
    try:
        judged(Case(mode="decode", prefix_lens=(90, 1, 2), extend_lens=(1,) * 3, head_dim=16, v_head_dim=16))
        judged(Case(prefix_lens=(3,), extend_lens=(4,), head_dim=16, v_head_dim=16))
    finally:
        set_hook(previous)
    names = ("metadata_kernel", "decode_kernel", "merge_ranges_kernel", "extend_kernel", "kv_write_kernel")
    assert set(names) <= set(seen)


def test_the_writer_saturates_scales_once_and_keeps_nan() -> None:
    """float16 KV stands in for fp8, whose elementwise operations the interpreter gets wrong."""
    k = torch.tensor([[[1.0, 1e9, -1e9, torch.nan] * 4]])
    v = torch.ones(1, 1, 16)
    cache_k, cache_v = torch.zeros(4, 1, 1, 16), torch.zeros(4, 1, 1, 16)
    two, four = torch.tensor([2.0]), torch.tensor([4.0])
    cache = attention.Cache.of(cache_k, cache_v, "NHD", two, four, scaled=True)
    attention.kv_write(k, v, cache, torch.tensor([3]))
    assert cache_k[3, 0, 0, :3].tolist() == [0.5, 5e8, -5e8]
    assert bool(cache_k[3, 0, 0, 3].isnan())
    assert cache_v[3].eq(0.25).all()
    assert k[0, 0, 0] == 1.0
