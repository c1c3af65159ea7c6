"""`deterministic="batch-invariant"` on the CPU: alone = batched = re-chunked, bit for bit, and right."""

from __future__ import annotations

import random

import pytest
import torch

import anyattn
from anyattn.core.traits import Determinism
from anyattn.testing import oracle
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case, CaseSpace, random_cases
from anyattn.testing.judge import judge, run_step
from anyattn.testing.world import World

ASKED = "batch-invariant"
TOTAL = 151
CASES = [
    Case(prefix_lens=(0,), extend_lens=(TOTAL,), page_size=page, num_q_heads=hq, num_kv_heads=hkv,
         head_dim=dim, v_head_dim=dim, window=window, logit_cap=cap, sinks=sinks, return_lse=lse,
         dtype=dtype, kv_dtype=dtype, slot_layout="shuffled_pages", seed=page)
    for page, hq, hkv, dim, window, cap, sinks, lse, dtype in [
        (16, 6, 3, 64, None, None, False, False, "float32"),
        (4, 4, 1, 16, 37, None, False, True, "float32"),
        (1, 2, 2, 24, None, 8.0, True, True, "float32"),
        (16, 8, 2, 80, 64, None, False, False, "bfloat16"),
        (64, 3, 1, 128, None, None, True, False, "float16"),
    ]
]  # fmt: skip


def chunkings(seed: int) -> list[list[int]]:
    """Whole, one by one, halves around tile edges, and random ones."""
    rng = random.Random(seed)
    found = [[TOTAL], [1] * TOTAL, [64, 64, TOTAL - 128], [63, 2, TOTAL - 65], [TOTAL - 1, 1], [16] * 9 + [7]]
    for _ in range(4):
        left, chunks = TOTAL, []
        while left:
            chunks.append(min(left, rng.choice([1, 2, 3, 7, 15, 16, 17, 31, 64, 65])))
            left -= chunks[-1]
        found.append(chunks)
    return found


def served(case: Case, chunks: list[int], others: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The first request's outputs, served in `chunks`; `others` run beside it, in chunks of their own."""
    crowd = Case(
        **{**_fields(case), "prefix_lens": (0,) * (others + 1), "extend_lens": (TOTAL,) * (others + 1)}
    )
    world = World(crowd, deterministic=ASKED)
    rng, generator = random.Random(others), torch.Generator().manual_seed(5)
    sizes = (case.num_q_heads, case.num_kv_heads, case.num_kv_heads)
    given = [
        [torch.randn(TOTAL, h, case.head_dim, generator=generator).to(world.dtype) for h in sizes]
        for _ in range(others + 1)
    ]
    if world.sinks is not None:
        world.layer.sinks.copy_(torch.linspace(-1, 1, case.num_q_heads))
    at, outs, lses = [0] * (others + 1), [], []
    for chunk in chunks:
        lens = [chunk, *(rng.randint(0, min(9, TOTAL - a)) for a in at[1:])]
        order = list(range(others + 1))
        rng.shuffle(order)
        rows = [tuple(x[at[m] : at[m] + lens[m]] for x in given[m]) for m in order]
        inputs = tuple(torch.cat(parts) for parts in zip(*rows, strict=True))
        mode = "decode" if set(lens) == {1} else "extend"
        step = build_step(
            world, order, [at[m] for m in order], [lens[m] for m in order], mode=mode, fill_prefix=False,
            inputs=inputs,  # type: ignore[arg-type]
        )  # fmt: skip
        run_step(step)
        first = sum(lens[m] for m in order[: order.index(0)])
        outs.append(step.out[first : first + chunk])
        lses.append(step.lse[first : first + chunk] if step.lse is not None else None)
        at = [a + n for a, n in zip(at, lens, strict=True)]
    return torch.cat(outs), torch.cat(lses) if case.return_lse else None


def _fields(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.dtype}-{c.head_dim}-{c.window}")
def test_rechunked_and_batched_is_whole_and_alone(case: Case) -> None:
    whole, whole_lse = served(case, [TOTAL])
    for chunks in chunkings(case.seed):
        for others in (0, 2) if len(chunks) < 40 else (0,):
            out, lse = served(case, chunks, others)
            assert torch.equal(out.view(torch.uint8), whole.view(torch.uint8)), (chunks[:8], others)
            assert lse is None or torch.equal(lse, whole_lse)


@pytest.mark.parametrize("block", range(4))
def test_it_is_right_in_every_feature(block: int) -> None:
    for case in list(random_cases(31, 160, CaseSpace(max_context=150)))[block::4]:
        world = World(case, deterministic=ASKED)
        step = build_step(world)
        run_step(step)
        report = judge(step)
        assert report.passed, str(report)


def test_it_is_declared_and_only_done_when_asked_for() -> None:
    for asked, want in ((None, Determinism.RUN_TO_RUN), (ASKED, Determinism.BATCH_INVARIANT)):
        world = World(CASES[0], deterministic=asked)
        for mode in (
            anyattn.ForwardMode.EXTEND,
            anyattn.ForwardMode.DECODE,
            anyattn.ForwardMode.TARGET_VERIFY,
        ):
            assert world.backend.traits(mode).determinism is want
    with pytest.raises(anyattn.AnyattnError, match="determinism"):
        anyattn.select(
            CASES[0].spec(), dtype="float32", backend="torch_native", deterministic=ASKED, host="cuda:sm90"
        )


def test_the_usual_method_is_not_invariant() -> None:
    """Otherwise the tests above would say nothing."""
    case = CASES[0]
    outs = []
    for chunks in ([TOTAL], [1] * TOTAL):
        world, at, parts = World(case), 0, []
        generator = torch.Generator().manual_seed(5)
        q, k, v = (torch.randn(TOTAL, h, 64, generator=generator) for h in (6, 3, 3))
        for chunk in chunks:
            rows = slice(at, at + chunk)
            step = build_step(
                world, [0], [at], [chunk], fill_prefix=False, inputs=(q[rows], k[rows], v[rows])
            )
            parts.append(run_step(step).out)
            at += chunk
        outs.append(torch.cat(parts))
    assert not torch.equal(*outs)
    assert oracle.relative_error(outs[0], outs[1].double()) < 1e-5
