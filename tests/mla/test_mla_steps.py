"""Latent attention on the reference, judged by definition: random steps, every method, DeepSeek's sizes."""

import random
from typing import Any

import pytest

from anyattn.core.mla import MLAMethod
from anyattn.testing.mla_cases import MLACase, MLASpace, random_mla_case
from anyattn.testing.mla_judge import MLAReport, check_mla_case

ABSORBED, MATERIALISED, CHUNKED = MLAMethod
HALF = MLASpace(dtypes=(("bfloat16", "bfloat16"), ("float16", "float16")))
FP8 = MLASpace(
    dtypes=tuple(("float32", f"float8_{kind}") for kind in ("e4m3fn", "e5m2", "e4m3fnuz")),
    kv_scales=(1.0, 0.5, 2.0),
)


def judged(case: MLACase) -> MLAReport:
    report = check_mla_case(case)
    assert report.passed, str(report)
    return report


@pytest.mark.parametrize("seed", range(120))
def test_random_steps(seed: int) -> None:
    judged(random_mla_case(random.Random(f"mla/{seed}")))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("space", [HALF, FP8], ids=["half", "fp8"])
def test_other_dtypes(space: MLASpace, seed: int) -> None:
    judged(random_mla_case(random.Random(f"mla-dtypes/{seed}"), space))


@pytest.mark.parametrize("heads", [16, 128])
def test_deepseek_sizes(heads: int) -> None:
    sizes: dict[str, Any] = {"num_q_heads": heads, "rank": 512, "rope": 64, "nope": 128, "v_dim": 128}
    decode = judged(MLACase(mode="decode", prefix_lens=(33, 0), extend_lens=(1, 1), page_size=16, **sizes))
    assert decode.method is ABSORBED
    prefill = judged(MLACase(prefix_lens=(0,), extend_lens=(12,), page_size=64, **sizes))
    assert prefill.method is MATERIALISED
    again = MLACase(prefix_lens=(20,), extend_lens=(3,), method="materialised", chunk_tokens=8, **sizes)
    assert judged(again).method is CHUNKED


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("kv", ["write", "arguments", "cached"])
def test_prefixes_in_chunks_of_any_size(chunk: int, kv: str) -> None:
    """Requests without a prefix, without new tokens, and longer than many chunks, together."""
    case = MLACase(
        prefix_lens=(31, 0, 5, 16), extend_lens=(3, 4, 0, 1), num_q_heads=3, page_size=4, kv=kv,
        method="materialised", chunk_tokens=chunk, sinks=True, slot_layout="interleaved",
    )  # fmt: skip
    assert judged(case).method is CHUNKED


def test_a_decode_may_be_materialised_on_request() -> None:
    case = MLACase(mode="decode", prefix_lens=(9, 0), extend_lens=(1, 1), method="materialised")
    assert judged(case).method is CHUNKED


@pytest.mark.parametrize("change", [{"mask": "random"}, {"window": 3}], ids=lambda c: next(iter(c)))
def test_masks_and_windows_are_absorbed(change: dict[str, Any]) -> None:
    case = MLACase(prefix_lens=(9, 2), extend_lens=(5, 4), method="materialised", **change)
    assert judged(case).method is ABSORBED


def test_the_judge_sees_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is read twice, a prefix under the causal rule, values with the rope part's scale."""
    import anyattn.core.mla_step as step

    case = MLACase(prefix_lens=(12,), extend_lens=(3,), method="materialised", chunk_tokens=5)
    real = step.prefix_chunks
    monkeypatch.setattr(step, "prefix_chunks", lambda lens, limit: [*real(lens, limit)][:1] * 2)
    assert not check_mla_case(case).passed
    monkeypatch.setattr(step, "prefix_chunks", lambda lens, limit: [*real(lens, limit)][:-1])
    assert not check_mla_case(case).passed
    monkeypatch.undo()
    assert check_mla_case(case).passed
