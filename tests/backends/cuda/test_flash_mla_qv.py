"""`fa3` and `fa4` for latent layers: what goes in as Q, `qv`, K and V, and what comes back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flash_stands import SGLANG, TOKENSPEED, VLLM, watched

import anyattn
from anyattn.core.mla import MLAMethod, MLAPolicy
from anyattn.errors import FeatureError, SelectionError
from anyattn.testing.emulators import emulating
from anyattn.testing.mla_cases import MLACase
from anyattn.testing.mla_judge import check_mla_case
from anyattn.testing.selecting import select_for

SPEC = anyattn.AttentionSpec(
    num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=192**-0.5, mla=anyattn.MLASpec()
)
BUILDS = [
    ("fa3", SGLANG, "sgl_kernel.flash_attn", "qv"),
    ("fa3", VLLM, "vllm.vllm_flash_attn", "q_v"),
    ("fa4", "cuda:sm100", "flash_attn.cute", "qv"),
]
CASE: dict[str, Any] = {
    "rank": 512, "rope": 64, "nope": 128, "v_dim": 128, "num_q_heads": 16, "dtype": "bfloat16",
    "kv_dtype": "bfloat16",
}  # fmt: skip


def backend_of(name: str, host: str, **options: Any) -> Any:
    limits = anyattn.Limits(max_requests=4, max_tokens=32, max_context=64)
    decision = select_for(
        [SPEC], device="cpu", host=host, dtype=torch.bfloat16, backend=name, page_size=8, limits=limits
    )
    pool = anyattn.kv.create_pool(decision, num_slots=32 * 8)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=64, device="cpu")
    for row in range(4):
        table.req_to_token[row] = 8 + row * 64 % 192 + torch.arange(64, dtype=torch.int32)
    return anyattn.create_backend(decision, pool, table, **options)


@pytest.mark.parametrize(("name", "host", "module", "argument"), BUILDS)
def test_rope_parts_are_q_and_k_and_latents_are_qv_and_v(
    name: str, host: str, module: str, argument: str
) -> None:
    with watched(name, host, module) as (paged, ragged, schedules):
        backend = backend_of(name, host)
        batch = anyattn.ForwardBatch.decode([0, 1], [20, 20], [8 + 19, 72 + 19])
        plan = backend.init_forward_metadata(batch)
        q, k = torch.randn(2, 16, 576).to(torch.bfloat16), torch.randn(2, 1, 576).to(torch.bfloat16)
        layer = anyattn.AttentionLayer(SPEC, 0)
        with anyattn.forward_context(backend, plan):
            out, lse = layer(q, k, None, batch, return_lse=True)
    (call,) = paged.seen or ragged.seen
    pages, values = call.get("k_cache", call.get("k")), call.get("v_cache", call.get("v"))
    cache = backend.pool.latent_cache(0)
    assert torch.equal(call["q"], q[..., 512:])
    assert torch.equal(call[argument], q[..., :512])
    assert pages.shape == (33, 8, 1, 64)
    assert values.shape == (33, 8, 1, 512)
    assert values.data_ptr() == cache.data_ptr()
    assert pages.data_ptr() == cache.data_ptr() + 512 * 2
    assert call["softmax_scale"] == pytest.approx(192**-0.5)
    assert not schedules.seen
    assert out.shape == (2, 16, 512)
    assert lse.shape == (2, 16)


@pytest.mark.parametrize(("name", "host"), [(name, host) for name, host, *_ in BUILDS])
@pytest.mark.parametrize("mode", ["decode", "extend", "verify"])
def test_latent_steps_are_right(name: str, host: str, mode: str) -> None:
    lens: dict[str, Any] = {
        "decode": {"prefix_lens": (7, 0, 40), "extend_lens": (1, 1, 1)},
        "extend": {"prefix_lens": (7, 0, 40), "extend_lens": (9, 17, 0), "padding": 2},
        "verify": {"prefix_lens": (7, 0, 40), "extend_lens": (3, 1, 4)},
    }[mode]
    case = MLACase(mode=mode, page_size=16, method="absorbed", **lens, **CASE)
    with emulating(name, host):
        report = check_mla_case(case, backend=name, host=host)
    assert report.passed, str(report)


@pytest.mark.parametrize(("name", "host"), [("fa3", SGLANG), ("fa4", "cuda:sm100")])
def test_materialised_prefills_go_in_chunks_and_merge(name: str, host: str) -> None:
    case = MLACase(
        prefix_lens=(7, 0, 40), extend_lens=(9, 17, 2), page_size=16, method="materialised", chunk_tokens=16,
        **CASE,
    )  # fmt: skip
    with emulating(name, host):
        report = check_mla_case(case, backend=name, host=host)
    assert report.method is MLAMethod.MATERIALISED_CHUNKED
    assert report.passed, str(report)


def test_vllms_bundle_is_declared_for_the_absorbed_form_alone() -> None:
    with emulating("fa3", VLLM):
        backend = backend_of("fa3", VLLM, mla=MLAPolicy(method=MLAMethod.MATERIALISED))
        batch = anyattn.ForwardBatch.extend([0], [0], [4], list(range(8, 12)))
        assert backend.init_forward_metadata(batch).mla_method is MLAMethod.ABSORBED


def test_tokenspeeds_build_has_no_latent_form() -> None:
    with pytest.raises(SelectionError, match="sglang-kernel"):
        select_for([SPEC], device="cpu", host=TOKENSPEED, dtype=torch.bfloat16, backend="fa3")


def _without_qv(function: Callable[..., Any]) -> Callable[..., Any]:
    def narrow(*args: Any, **given: Any) -> Any:
        return function(*args, **given)

    kept = [p for p in inspect.signature(function).parameters.values() if p.name != "qv"]
    narrow.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return narrow


def test_a_build_without_qv_is_told_by_its_signature() -> None:
    with emulating("fa3", SGLANG):
        module = sys.modules["sgl_kernel.flash_attn"]
        module.flash_attn_with_kvcache = _without_qv(module.flash_attn_with_kvcache)  # type: ignore[attr-defined]
        with pytest.raises(FeatureError, match="latent form"):
            backend_of("fa3", SGLANG)
