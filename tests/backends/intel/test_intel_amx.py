"""`intel_amx` on its stand-in, and on vllm-cpu itself where that is installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.intel import vllm_cpu_pages
from anyattn.core.kv.pools.packed import PackedPool
from anyattn.errors import BackendBuildError, PoolError, SelectionError
from anyattn.kernels import vllm_cpu
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.checks import Subject
from anyattn.testing.declared import declared
from anyattn.testing.emulators import emulating
from anyattn.testing.judge import check_case, judge, run_step
from anyattn.testing.kit import run_items
from anyattn.testing.mutants import MUTANTS, Mutant
from anyattn.testing.mutants.hunt import hunt_one, hunt_text
from anyattn.testing.plan import plan_kit
from anyattn.testing.world import World

SCHEMAS = {
    "get_scheduler_metadata": "num_req num_heads_q num_heads_kv head_dim seq_lens dtype query_start_loc "
    "casual window_size isa_hint enable_kv_split dynamic_causal kv_cache_dtype",
    "cpu_attn_reshape_and_cache": "key value key_cache value_cache slot_mapping isa k_scale v_scale "
    "kv_cache_dtype",
    "cpu_attention_with_kv_cache": "query key_cache value_cache output query_start_loc seq_lens scale causal "
    "alibi_slopes sliding_window_size block_table softcap scheduler_metadata s_aux dynamic_causal k_scale "
    "v_scale kv_cache_dtype",
}
"""Arguments of the operators of vllm-cpu 0.32.0, in order."""

LAYOUTS = {
    "cpu:amx": ("CPU_AMX", "bfloat16"),
    "cpu:avx512": ("CPU_VEC", "float32"),
    "cpu:avx2": ("CPU_VEC16", "float16"),
}


def _installed() -> bool:
    try:
        return metadata.version("vllm-cpu").startswith("0.32.") and torch.__version__.startswith("2.13.")
    except metadata.PackageNotFoundError:
        return False


real = pytest.mark.skipif(not _installed(), reason="vllm-cpu 0.32 and torch 2.13 aren't installed")


@pytest.fixture(name="library", params=LAYOUTS)
def _library(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, str]]:
    with emulating("intel_amx", request.param):
        yield (request.param, *LAYOUTS[request.param])


def _case(layout: str = "CPU_VEC", dtype: str = "float32", **fields: Any) -> Case:
    base: dict[str, Any] = {
        "mode": "mixed", "prefix_lens": (40, 0, 65), "extend_lens": (9, 33, 1), "page_size": 32,
        "layout": layout, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64,
        "dtype": dtype, "kv_dtype": dtype, "return_lse": False, "slot_layout": "shuffled_pages",
    }  # fmt: skip
    return Case(**{**base, **fields})


def test_stand_ins_take_what_the_operators_take() -> None:
    with emulating("intel_amx"):
        module = importlib.import_module("vllm._C")
        for name, wanted in SCHEMAS.items():
            assert " ".join(inspect.signature(getattr(module, name)).parameters) == wanted


@real
def test_the_operators_are_those_that_were_recorded() -> None:
    kernels = vllm_cpu.load_kernels("vec")
    for operator, wanted in zip(
        (kernels.schedule, kernels.write, kernels.attend), SCHEMAS.values(), strict=True
    ):
        schema: Any = operator._schema  # type: ignore[attr-defined]
        assert " ".join(argument.name for argument in schema.arguments) == wanted


@pytest.mark.parametrize("fields", [{}, {"window": 17, "sinks": True}, {"logit_cap": 3.0, "strided": True}])
def test_mixed_steps_on_every_instruction_set(library: tuple[str, str, str], fields: dict[str, Any]) -> None:
    host, layout, dtype = library
    report = check_case(_case(layout, dtype, **fields), backend="intel_amx", host=host)
    assert report.passed, str(report)


_BY_16 = {"layout": "CPU_VEC16", "page_size": 16, "head_dim": 80, "v_head_dim": 80}


@real
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("fields", [{}, {"window": 17, "sinks": True}, _BY_16])
def test_the_real_kernels(dtype: str, fields: dict[str, Any]) -> None:
    report = check_case(_case(dtype=dtype, **fields), backend="intel_amx", device="cpu")
    assert report.passed, str(report)


@pytest.fixture(name="subject")
def _subject() -> Iterator[Subject]:
    with emulating("intel_amx", "cpu:amx"):
        yield Subject(declared("intel_amx", "cpu", "cpu:amx"), "cpu", "cpu:amx")


def test_the_kit_passes(subject: Subject) -> None:
    results = run_items(plan_kit(subject.declared).items[::5], subject)
    assert [f"{r.item.label()}: {r.why}" for r in results if r.why is not None] == []
    assert sum(r.passed for r in results) > 15


@pytest.mark.parametrize("mutant", MUTANTS["intel_amx"], ids=lambda m: m.name.replace(" ", "-"))
def test_faults_are_caught(subject: Subject, mutant: Mutant) -> None:
    caught = hunt_one(mutant, plan_kit(subject.declared).items, subject)
    assert caught.caught, hunt_text([caught])


def test_a_step_is_scheduled_once_for_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("intel_amx", "cpu:avx512"):
        module: Any = importlib.import_module("vllm._C")
        made: list[tuple[Any, ...]] = []
        original = module.get_scheduler_metadata

        def counted(*args: Any) -> torch.Tensor:
            made.append(args)
            return original(*args)

        monkeypatch.setattr(module, "get_scheduler_metadata", counted)
        case = _case()
        few = _case(num_q_heads=2)
        world = World(
            case, backend="intel_amx", host="cpu:avx512", specs=[c.spec() for c in (case, case, few)]
        )
        step = build_step(world)
        plan = world.backend.init_forward_metadata(step.batch)
        assert judge(run_step(step, plan)).passed
        assert [args[1] for args in made] == [4]
        for layer_id in (1, 2, 2):
            layer = anyattn.AttentionLayer(world.decision.request.specs[layer_id], layer_id)
            q = step.q[:, : layer.spec.num_q_heads]
            with anyattn.forward_context(world.backend, plan):
                layer(q, step.k, step.v, step.batch)
        assert [args[1] for args in made] == [4, 2]  # fewer heads: a schedule of their own, once


def test_pools_are_the_librarys_own_pages() -> None:
    with emulating("intel_amx", "cpu:amx"):
        world = World(_case("CPU_AMX", "bfloat16"), backend="intel_amx", host="cpu:amx")
        assert isinstance(world.pool, PackedPool)
        assert world.pool.key_cache(0).shape[1:] == (2, 32, 64)
        for options in ({"k_scale": 0.5}, {"window_slots": 64}, {"num_ids": 64}):
            with pytest.raises(PoolError, match="own format"):
                anyattn.kv.create_pool(world.decision, num_slots=64, **options)
        with pytest.raises(PoolError, match="CPU_VEC16"):
            vllm_cpu_pages.packed_format("NHD", torch.float32)


def test_another_torch_is_refused_by_name() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    with pytest.raises(SelectionError, match=r"torch 2\.12"):
        anyattn.select([spec], dtype=torch.float32, backend="intel_amx", host="cpu:avx512+torch==2.12.0")
    chosen = anyattn.select([spec], dtype=torch.float32, host="cpu:avx512+torch==2.12.0")
    assert chosen.decode.backend != "intel_amx"


@pytest.mark.parametrize(
    ("bf16", "avx512", "isa", "build"),
    [(True, True, "vec", "_C"), (False, True, "vec", "_C_AVX512"), (False, False, "vec16", "_C_AVX2"),
     (False, True, "amx", "_C")],
)  # fmt: skip
def test_the_build_is_what_the_cpu_has(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, avx512: bool, isa: str, build: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    loaded: list[str] = []
    monkeypatch.setattr(vllm_cpu, "_registered", lambda name: name if loaded else None)
    monkeypatch.setattr(vllm_cpu, "_load", loaded.append)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    assert vllm_cpu.load_kernels(isa).attend == "cpu_attention_with_kv_cache"  # type: ignore[comparison-overlap]
    assert loaded == [build]
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: False)
    if isa == "amx":
        with pytest.raises(BackendBuildError, match="AMX"):
            vllm_cpu.load_kernels(isa)


@pytest.mark.parametrize(
    ("file", "says"), [("_C_AVX2.abi3.so", "don't load into torch"), ("other", "compiled")]
)
def test_kernels_that_do_not_load_are_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, says: str
) -> None:
    (tmp_path / file).write_bytes(b"not a library")
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: False)
    monkeypatch.setattr(vllm_cpu, "_registered", lambda name: None)
    with pytest.raises(BackendBuildError, match=says):
        vllm_cpu.load_kernels("vec")


def test_operators_of_other_names_are_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulating("intel_amx"):
        module = importlib.import_module("vllm._C")
        monkeypatch.delattr(module, "get_scheduler_metadata")
        with pytest.raises(BackendBuildError, match="get_scheduler_metadata"):
            vllm_cpu.load_kernels("vec")
