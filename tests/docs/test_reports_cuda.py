"""Faults that users of other systems reported on CUDA, tried here: `docs/reports.md` says which is which.

NVIDIA's libraries are stand-ins of their documented behaviour: what is shown is how they are called.
"""

from __future__ import annotations

import pytest

import anyattn
from anyattn.core.capabilities import Feature, Phase
from anyattn.errors import SelectionError
from anyattn.testing.cases import Case
from anyattn.testing.judge import check_case

ALL = ("flashinfer", "fa3", "fa4")
SPEC = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64}
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "dtype": "bfloat16",
         "kv_dtype": "bfloat16", "page_size": 16, "slot_layout": "shuffled_pages"}  # fmt: skip


def held(backend: str, **fields: object) -> None:
    report = check_case(Case(**{**SHAPE, **fields}), backend=backend, emulated=True)
    assert report.passed, str(report)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("prefix", [0, 40])
def test_prompts_longer_than_their_window(backend: str, prefix: int) -> None:
    """With and without a cached prefix, several windows long, beside a short one."""
    held(backend, mode="extend", prefix_lens=(prefix, 0), extend_lens=(61, 3), window=9)


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize(
    ("mode", "prefix", "extend"),
    [("decode", (40, 3), (1, 1)), ("extend", (0, 0), (19, 4)), ("extend", (33, 0), (5, 7))],
)
def test_lse_is_natural_and_token_major(
    backend: str, mode: str, prefix: tuple[int, ...], extend: tuple[int, ...]
) -> None:
    """Paged, over the new tokens alone, and merged from both."""
    held(backend, mode=mode, prefix_lens=prefix, extend_lens=extend, return_lse=True)


@pytest.mark.parametrize(
    ("backend", "mode"), [(b, m) for b in ("flashinfer", "fa3") for m in ("decode", "extend")]
)
def test_fp8_scales_count_once(backend: str, mode: str) -> None:
    """A scale that is left out, or applied twice, is off by a factor; both numbers differ from 1."""
    extend = (1, 1) if mode == "decode" else (6, 3)
    held(
        backend, mode=mode, prefix_lens=(21, 5), extend_lens=extend, kv_dtype="float8_e4m3fn",
        k_scale=0.5, v_scale=2.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "host"), [("fa3", "cuda:sm90-tokenspeed-fa3-vllm"), ("fa4", "cuda:sm90")]
)
def test_sinks_are_not_lost_on_the_way(backend: str, host: str) -> None:
    case = Case(**SHAPE, mode="extend", prefix_lens=(20, 0), extend_lens=(4, 9), sinks=True)
    report = check_case(case, backend=backend, host=host, emulated=True)
    assert report.passed, str(report)


@pytest.mark.parametrize("host", ["cuda:sm120", "cuda:sm121"])
def test_sinks_on_sm120(host: str) -> None:
    """Somebody serves them in every phase; who can't is refused with the reason and who can."""
    spec = anyattn.AttentionSpec(**SPEC, sinks=True)
    decision = anyattn.select(spec, dtype="bfloat16", host=host)
    assert all(Feature.SINKS in decision.phase(phase).row.features for phase in Phase)
    with pytest.raises(SelectionError, match="feature: asked sinks") as refused:
        anyattn.select(spec, dtype="bfloat16", kv_dtype="float8_e4m3fn", host=host, backend="flashinfer")
    assert "the nearest that would do: prefill='triton'" in str(refused.value)


@pytest.mark.parametrize("host", ["cuda:sm86", "cuda:sm89"])
@pytest.mark.parametrize("size", [32, 224, 256, 512])
def test_head_sizes_on_chips_with_little_shared_memory(host: str, size: int) -> None:
    """The rows that serve list the chip and the size themselves; others have another backend."""
    spec = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=size)
    decision = anyattn.select(spec, dtype="bfloat16", host=host)
    for phase in (Phase.PREFILL, Phase.DECODE):
        row = decision.phase(phase).row
        assert host in row.architectures
        assert row.head_dims.allows(size, size)


@pytest.mark.parametrize("feature", ["chunked_local", "alibi"])
def test_attention_that_nobody_has_is_refused_by_name(feature: str) -> None:
    spec = anyattn.AttentionSpec(**SPEC)
    with pytest.raises(SelectionError, match=f"feature: asked {feature}"):
        anyattn.select(spec, dtype="bfloat16", host="cuda:sm90", features=[feature])
