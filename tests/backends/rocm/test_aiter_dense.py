"""`aiter` on stand-ins of both builds: results by definition, arguments, graphs, refusals."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.rocm.aiter_layers import Scratch
from anyattn.core.traits import SharedReadEnds
from anyattn.errors import BackendBuildError, SelectionError
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.emulators import emulating
from anyattn.testing.judge import check_case, expected, run_step
from anyattn.testing.selecting import select_for
from anyattn.testing.world import World

_PYPI = {"gfx942": "rocm:gfx942", "gfx950": "rocm:gfx950"}
_MAIN = {chip: f"{host}+amd-aiter==0.1.20" for chip, host in _PYPI.items()}
_BASE = Case(
    prefix_lens=(0, 37, 300), extend_lens=(5, 1, 9), page_size=32, slot_layout="shuffled_pages",
    num_q_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, dtype="bfloat16", kv_dtype="bfloat16",
    return_lse=False,
)  # fmt: skip
_DECODE = dataclasses.replace(_BASE, mode="decode", extend_lens=(1, 1, 1))


def _check(case: Case, host: str) -> None:
    report = check_case(case, backend="aiter", host=host, emulated=True)
    assert report.passed, report


@pytest.mark.parametrize("host", [*_PYPI.values(), _MAIN["gfx942"]])
@pytest.mark.parametrize(
    "fields",
    [
        {"return_lse": False, "strided": True, "window": 20, "logit_cap": 1.5},
        {"head_dim": 64, "v_head_dim": 64, "window": 20},
        {"num_q_heads": 24, "num_kv_heads": 1, "sinks": True, "window": 4, "scale": 0.3, "flat": True},
        {"mode": "verify", "extend_lens": (3, 1, 4), "give_out": True},
        {"mode": "mixed", "num_decode": 1, "extend_lens": (5, 2, 1)},
    ],
    ids=["capped window", "gathered", "sinks", "verify", "mixed"],
)
def test_extends_by_definition(host: str, fields: dict[str, Any]) -> None:
    _check(dataclasses.replace(_BASE, **fields), host)


@pytest.mark.parametrize("host", [*_PYPI.values(), _MAIN["gfx950"]])
@pytest.mark.parametrize(
    "fields",
    [
        {"strided": True, "give_out": True},
        {"window": 20, "scale": 0.3, "padding": 2},
        {"logit_cap": 1.5, "head_dim": 256, "v_head_dim": 256},
        {"window": 20, "logit_cap": 1.5},
        {"sinks": True, "head_dim": 64, "v_head_dim": 64},
    ],
    ids=["strided", "window", "cap", "capped window", "sinks"],
)
def test_decodes_by_definition(host: str, fields: dict[str, Any]) -> None:
    _check(dataclasses.replace(_DECODE, **fields), host)


@pytest.mark.parametrize(("chip", "kind"), [("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")])
@pytest.mark.parametrize("build", ["pypi", "main"])
@pytest.mark.parametrize("base", [_BASE, _DECODE], ids=["extend", "decode"])
def test_eight_bits_of_each_chip(chip: str, kind: str, build: str, base: Case) -> None:
    host = (_PYPI if build == "pypi" else _MAIN)[chip]
    for scales in ({"k_scale": 0.5, "v_scale": 2.0}, {"k_scale": (0.5, 2.0), "v_scale": (1.0, 0.25)}):
        _check(dataclasses.replace(base, kv_dtype=kind, **scales), host)


@pytest.mark.parametrize("base", [_BASE, _DECODE], ids=["extend", "decode"])
def test_vectorised_caches(base: Case) -> None:
    for chip in ("gfx942", "gfx950"):
        case = dataclasses.replace(base, layout="VECTORISED_5D", page_size=16, strided=True)
        _check(case, _MAIN[chip])


def test_a_chip_refuses_the_others_eight_bits() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    for host, kind in ((_PYPI["gfx942"], torch.float8_e4m3fn), (_PYPI["gfx950"], torch.float8_e4m3fnuz)):
        with pytest.raises(SelectionError, match="kv_dtype"):
            anyattn.select([spec], dtype=torch.bfloat16, kv_dtype=kind, host=host, backend="aiter")


@pytest.mark.parametrize("host", ["rocm:gfx90a", "rocm:gfx1100", "rocm:gfx1201"])
def test_chips_without_its_binaries_are_refused(host: str) -> None:
    spec = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    with pytest.raises(SelectionError, match="architecture"):
        anyattn.select([spec], dtype=torch.bfloat16, host=host, backend="aiter")


def test_a_capped_window_never_meets_the_kernel_that_caps_last() -> None:
    """`paged_attention_v1` caps what its window has hidden: hidden keys come back as `-cap`."""
    both = anyattn.AttentionSpec(
        num_q_heads=8, num_kv_heads=2, head_dim=128, sliding_window=64, logit_cap=50.0
    )
    apart = [dataclasses.replace(both, logit_cap=None), dataclasses.replace(both, sliding_window=None)]
    for specs in ([both], apart):
        decision = anyattn.select(specs, dtype=torch.bfloat16, host=_PYPI["gfx942"], backend="aiter")
        assert decision.decode.row.method.startswith("unified_attention")


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Keyword arguments of every `paged_attention_v1` on the PyPI build's stand-in."""
    with emulating("aiter"):
        module = importlib.import_module("aiter.ops.attention")
        real, seen = module.paged_attention_v1, []

        def paged_attention_v1(*args: Any, sliding_window: int = 0, **given: Any) -> Any:
            seen.append({**given, "sliding_window": sliding_window})
            return real(*args, sliding_window=sliding_window, **given)

        monkeypatch.setattr(module, "paged_attention_v1", paged_attention_v1)
        yield seen


def test_what_decode_passes(calls: list[dict[str, Any]]) -> None:
    for window, reach in ((None, 301), (20, 64)):
        world = World(dataclasses.replace(_DECODE, window=window), backend="aiter", host=_PYPI["gfx942"])
        run_step(build_step(world))
        assert (calls[-1]["sliding_window"], calls[-1]["max_context_len"]) == (window or 0, reach)
    assert calls[-1]["kv_cache_dtype"] == "auto"
    assert calls[-1]["key_cache"].shape[1:] == (32, 2, 128)


def test_a_captured_decode_serves_every_length(calls: list[dict[str, Any]]) -> None:
    spec = anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128)
    limits = anyattn.Limits(max_requests=4, max_tokens=16, max_context=512)
    decision = select_for(
        [spec], device="cpu", host=_PYPI["gfx942"], dtype="bfloat16", backend="aiter", limits=limits
    )
    pool = anyattn.kv.create_pool(decision, num_slots=64 * decision.kv.page_size)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=512, device="cpu")
    for row in range(2):
        table.req_to_token[row] = (16 * row + 1) * pool.page_size + torch.arange(512)
    hybrid = anyattn.create_backend(decision, pool, table)
    hybrid.init_cuda_graph_state(limits)
    layer = anyattn.AttentionLayer(spec, 0)

    def batch(*lens: int) -> anyattn.ForwardBatch:
        slots = [int(table.req_to_token[row, n - 1]) for row, n in enumerate(lens)]
        return anyattn.ForwardBatch.decode(list(range(len(lens))), list(lens), slots)

    plan = hybrid.init_forward_metadata_out_graph(first := batch(1, 1), in_capture=True)
    hybrid.init_forward_metadata_in_graph(plan)
    q, k = torch.randn(2, 8, 128).bfloat16(), torch.randn(2, 2, 128).bfloat16()
    with anyattn.forward_context(hybrid, plan):
        layer(q, k, k, first)
    again = batch(400, 33)
    assert hybrid.init_forward_metadata_out_graph(again, captured=plan) is plan
    hybrid.init_forward_metadata_in_graph(plan)
    with anyattn.forward_context(hybrid, plan):
        assert not layer(q, k, k, again).isnan().any()
    before, after = calls
    assert before["max_context_len"] == after["max_context_len"] == 512
    for name in ("workspace_buffer", "block_tables", "context_lens"):
        assert before[name].data_ptr() == after[name].data_ptr()


def test_declarations() -> None:
    with emulating("aiter", _MAIN["gfx942"]):
        case = dataclasses.replace(_BASE, kv_dtype="float8_e4m3fnuz")
        world = World(case, backend="aiter", host=_MAIN["gfx942"])
        traits = world.backend.traits(anyattn.ForwardMode.EXTEND)
        assert traits.shared_read_ends is SharedReadEnds.IN_REPLAY
        assert traits.rounds_queries, "CK reads 8 bits with 8-bit queries"
        assert not world.backend.traits(anyattn.ForwardMode.DECODE).rounds_queries


def test_a_build_without_a_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("aiter"):
        monkeypatch.delattr("aiter.ops.mha.mha_batch_prefill_func")
        with pytest.raises(BackendBuildError, match="mha_batch_prefill_func"):
            World(_BASE, backend="aiter", host=_PYPI["gfx942"])


def test_scratch_of_graphs_is_never_replaced() -> None:
    scratch = Scratch(torch.device("cpu"))
    small = scratch.take(10, stable=True)
    large = scratch.take(100, stable=True)
    eager = scratch.take(50, stable=False)
    assert scratch.take(5, stable=True) is small
    assert scratch.take(60, stable=True) is large
    assert scratch.take(20, stable=False) is eager
    assert scratch.take(70, stable=False) is not eager


@pytest.mark.parametrize(
    "fields", [{}, {"head_dim": 64, "v_head_dim": 64}], ids=["batch prefill", "gathered"]
)
def test_prefills_log_sums(fields: dict[str, Any]) -> None:
    """Decode has none, so no model that needs them is served throughout; prefill's are right all the same."""
    with emulating("aiter"):
        world = World(dataclasses.replace(_BASE, **fields), backend="aiter", host=_PYPI["gfx942"])
        step = build_step(world)
        plan = world.backend.init_forward_metadata(step.batch)
        with anyattn.forward_context(world.backend, plan):
            _, lse = world.layer(step.q, step.k, step.v, step.batch, return_lse=True)
    _, wanted = expected(step)
    assert torch.allclose(lse.double(), wanted, atol=1e-2)
