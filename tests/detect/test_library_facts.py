"""Library facts: presence, version, and who really owns a module, in fake site-packages folders."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
from detect_fakes import install, sources

from anyattn.core.facts import LibraryFacts, LibraryState
from anyattn.detect import KNOWN, Library
from anyattn.detect.libraries import read_libraries, read_library
from anyattn.detect.library import normalise


def look(name: str, *path: Path, torch: str | None = "2.14.1") -> LibraryFacts:
    facts = read_library(KNOWN[name], sources(Path("/nowhere"), path=tuple(map(str, path))), torch)
    assert facts is not None
    return facts


def read(*path: Path) -> tuple[dict[str, LibraryFacts], tuple[str, ...]]:
    return read_libraries(sources(Path("/nowhere"), path=tuple(map(str, path))), "2.14.1", KNOWN.values())


def test_an_installed_library(tmp_path: Path) -> None:
    install(tmp_path, "flashinfer_python", "0.7.2.post1", {"flashinfer/__init__.py": "raise SystemExit"})
    assert look("flashinfer-python", tmp_path) == LibraryFacts(
        "flashinfer-python", "0.7.2.post1", ("flashinfer",), LibraryState.UNKNOWN
    )


def test_only_what_is_installed_is_listed(tmp_path: Path) -> None:
    install(tmp_path, "triton", "3.9.0", {"triton/__init__.py": ""})
    install(tmp_path, "numpy", "2.0", {"numpy/__init__.py": ""})
    libraries, notes = read(tmp_path)
    assert list(libraries) == ["triton"]
    assert notes == ()


def test_a_single_file_and_a_compiled_module(tmp_path: Path) -> None:
    install(tmp_path, "tokenspeed-fa3", "3.0", {"flash_attn_interface.py": "x = 1"})
    install(tmp_path, "hpc-ops", "0.0.1.dev0+gabc", {"hpc.abi3.so": "binary"})
    assert look("tokenspeed-fa3", tmp_path).modules == ("flash_attn_interface",)
    assert look("hpc-ops", tmp_path).modules == ("hpc",)


def test_fa4_inside_a_namespace_package(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": "fa4"})
    libraries, _ = read(tmp_path)
    assert libraries["flash-attn-4"].modules == ("flash_attn.cute",)
    assert "flash-attn" not in libraries, "importing flash_attn works, FlashAttention-2 isn't there"


def test_fa2_and_fa4_share_a_folder(tmp_path: Path) -> None:
    install(tmp_path, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": "fa4"})
    install(tmp_path, "flash-attn", "2.8.3", {"flash_attn/__init__.py": "fa2"})
    libraries, _ = read(tmp_path)
    assert libraries["flash-attn"].modules == ("flash_attn",)
    assert libraries["flash-attn-4"].modules == ("flash_attn.cute",)


@pytest.mark.parametrize("last", ["sgl-flash-mla", "tokenspeed-flashmla"])
def test_the_last_one_installed_owns_a_shared_module(tmp_path: Path, last: str) -> None:
    first = ({"sgl-flash-mla", "tokenspeed-flashmla"} - {last}).pop()
    for name in (first, last):
        install(tmp_path, name, "1.0.0", {"flash_mla/__init__.py": f"# {name}"})
    libraries, _ = read(tmp_path)
    assert libraries[last].modules == ("flash_mla",)
    assert libraries[last].reason is None
    loser = libraries[first]
    assert (loser.modules, loser.state) == ((), LibraryState.UNKNOWN)
    assert loser.reason == f"module flash_mla belongs to {last}, which was installed later"


def test_with_equal_files_the_time_of_installation_decides(tmp_path: Path) -> None:
    same = {"sgl_kernel/__init__.py": "from .ops import *"}
    install(tmp_path, "sgl-kernel", "0.3.21", same, at=2000.0)
    install(tmp_path, "sglang-kernel", "0.4.10", same, at=1000.0)
    libraries, _ = read(tmp_path)
    assert libraries["sgl-kernel"].modules == ("sgl_kernel",)
    assert libraries["sglang-kernel"].modules == ()


def test_a_file_edited_by_hand_stays_its_owner_s(tmp_path: Path) -> None:
    install(tmp_path, "sglang-kernel", "0.4.10", {"sgl_kernel/__init__.py": "x"})
    (tmp_path / "sgl_kernel/__init__.py").write_text("x = print('debugging')")
    assert look("sglang-kernel", tmp_path).modules == ("sgl_kernel",)


def test_a_stranger_with_the_same_module_does_not_count(tmp_path: Path) -> None:
    install(tmp_path, "aiter", "0.13.20191203", {"aiter/__init__.py": "async iterators"})
    libraries, notes = read(tmp_path)
    assert "amd-aiter" not in libraries
    assert notes == (
        "aiter 0.13.20191203 is installed: its module aiter is not amd-aiter's and doesn't count",
    )


@pytest.mark.parametrize("stranger", ["aiter", "quite-unknown"])
def test_a_stranger_that_overwrote_the_module_breaks_it(tmp_path: Path, stranger: str) -> None:
    install(tmp_path, "amd-aiter", "0.1.7", {"aiter/__init__.py": "AMD's"})
    install(tmp_path, stranger, "0.13", {"aiter/__init__.py": "somebody else's"})
    facts = look("amd-aiter", tmp_path)
    assert (facts.modules, facts.state) == ((), LibraryState.BROKEN)
    assert facts.reason == f"module aiter belongs to {stranger}, which was installed later"


def test_a_folder_earlier_on_the_path_shadows(tmp_path: Path) -> None:
    site, work = tmp_path / "site", tmp_path / "work"
    install(site, "amd-aiter", "0.1.7", {"aiter/__init__.py": ""})
    (work / "aiter").mkdir(parents=True)
    (work / "aiter/__init__.py").write_text("my own")
    facts = look("amd-aiter", work, site)
    assert (facts.modules, facts.state) == ((), LibraryState.BROKEN)
    assert "shadowed by" in (facts.reason or "")
    assert look("amd-aiter", site, work).modules == ("aiter",)


def test_files_that_are_gone(tmp_path: Path) -> None:
    install(tmp_path, "sgl-flash-mla", "1.0.0", {"flash_mla/__init__.py": "x"})
    shutil.rmtree(tmp_path / "flash_mla")  # as uninstalling the other build does
    facts = look("sgl-flash-mla", tmp_path)
    assert (facts.modules, facts.state) == ((), LibraryState.BROKEN)
    assert facts.reason == "module flash_mla isn't on disk: reinstall it"


def test_a_distribution_without_the_module(tmp_path: Path) -> None:
    install(tmp_path, "wave-lang", "3.9.1", {"other/__init__.py": "x"})
    (tmp_path / "wave_lang").mkdir()
    (tmp_path / "wave_lang/__init__.py").write_text("")
    assert look("wave-lang", tmp_path).reason == "its RECORD doesn't list module wave_lang"


def test_an_editable_install_owns_what_it_imports(tmp_path: Path) -> None:
    info = install(tmp_path, "fla-core", "0.6.0", {"__editable__.fla_core.pth": str(tmp_path / "src")})
    (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": True}}))
    source = tmp_path / "src/fla"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    assert look("fla-core", tmp_path, tmp_path / "src").modules == ("fla",)


def test_a_package_of_the_system_has_no_record(tmp_path: Path) -> None:
    install(tmp_path, "triton", "3.6.0", {"triton/__init__.py": ""}, record=False)
    assert look("triton", tmp_path).modules == ("triton",)


def test_another_build_of_triton_stands_in(tmp_path: Path) -> None:
    install(tmp_path, "pytorch-triton-rocm", "3.6.0", {"triton/__init__.py": "rocm"})
    facts = look("triton", tmp_path)
    assert (facts.distribution, facts.version, facts.modules) == ("triton", "3.6.0", ("triton",))
    assert facts.reason == "provided by pytorch-triton-rocm"


def test_the_build_that_overwrote_triton_counts(tmp_path: Path) -> None:
    install(tmp_path, "triton", "3.9.0", {"triton/__init__.py": "upstream"})
    install(tmp_path, "triton-rocm", "3.7.0", {"triton/__init__.py": "rocm"})
    assert look("triton", tmp_path).version == "3.7.0"


def test_triton_ascend_takes_triton_s_module(tmp_path: Path) -> None:
    install(tmp_path, "triton", "3.9.0", {"triton/__init__.py": "upstream"})
    install(tmp_path, "triton-ascend", "3.2.0", {"triton/__init__.py": "ascend"})
    libraries, _ = read(tmp_path)
    assert libraries["triton"].modules == ()
    assert libraries["triton-ascend"].modules == ("triton",)


@pytest.mark.parametrize(
    ("torch", "broken"), [("2.8.0", False), ("2.8.1+cpu", False), ("2.13.0+cpu", True), (None, False)]
)
def test_ipex_works_with_one_torch(tmp_path: Path, torch: str | None, broken: bool) -> None:
    module = {"intel_extension_for_pytorch/__init__.py": ""}
    install(tmp_path, "intel-extension-for-pytorch", "2.8.0", module)
    facts = look("intel-extension-for-pytorch", tmp_path, torch=torch)
    assert (facts.state is LibraryState.BROKEN) == broken
    assert ("torch ==2.8.*" in (facts.reason or "")) == broken


@pytest.mark.parametrize(
    ("requirement", "torch", "reason"),
    [
        ("torch==2.14.1", "2.13.0", "was built for torch ==2.14.1, this is 2.13.0: probe it"),
        ("torch==2.14.1", "2.14.1+cu130", None),
        ("torch>=2.8", "2.13.0", None),
        ('torch==2.9.1; extra == "old"', "2.13.0", None),
        ("torchvision==0.1", "2.13.0", None),
        ("torch (==2.14.1", "2.13.0", None),
        ("torch==2.14.1", "built-by-hand", None),
    ],
)
def test_an_unmet_pin_is_a_reason(tmp_path: Path, requirement: str, torch: str, reason: str | None) -> None:
    install(tmp_path, "sglang-kernel", "0.4.10", {"sgl_kernel/__init__.py": ""}, requires=(requirement,))
    facts = look("sglang-kernel", tmp_path, torch=torch)
    assert (facts.state, facts.reason) == (LibraryState.UNKNOWN, reason)


def test_metadata_that_cannot_be_read(tmp_path: Path) -> None:
    install(tmp_path, "fla-core", "0.6.0", {"fla/__init__.py": ""}, metadata="")
    facts = look("fla-core", tmp_path)
    assert facts.state is LibraryState.BROKEN
    assert "metadata" in (facts.reason or "")


def test_a_lookup_that_raises_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("odd")

    monkeypatch.setattr("anyattn.detect.libraries.find", fail)
    libraries, notes = read(tmp_path)
    assert libraries == {}
    assert "triton can't be looked up: RuntimeError: odd" in notes


def test_a_plugin_s_library(tmp_path: Path) -> None:
    library = Library(
        distribution="acme-attn",
        modules=("acme",),
        platforms=("cuda",),
        recorded=None,
        provides="ACME's kernels",
    )
    install(tmp_path, "acme_attn", "1.2", {"acme/__init__.py": ""})
    found, _ = read_libraries(sources(tmp_path, path=(str(tmp_path),)), None, [library])
    assert found["acme-attn"].modules == ("acme",)


@pytest.mark.parametrize("name", ["sgl_kernel", "SGL-Kernel", "sgl.kernel", "sgl--kernel"])
def test_names_are_normalised(name: str) -> None:
    assert normalise(name) == "sgl-kernel"


def test_known_names_are_normal_and_have_a_remedy() -> None:
    for name, library in KNOWN.items():
        assert name == normalise(name) == library.distribution
        assert library.modules
        assert library.remedy.startswith("pip install ") or library.remedy[:1].isupper()


def test_the_catalog_asks_for_nothing_that_is_unknown() -> None:
    """A provider that detection doesn't look up would count as missing everywhere."""
    from anyattn.catalog import records

    providers = {p for r in records() for row in r.rows for p in (*row.providers, *row.requires)}
    assert {p.distribution for p in providers} <= set(KNOWN)
    for provider in providers:
        assert set(provider.modules) <= set(KNOWN[provider.distribution].modules)


def test_looking_up_everything_is_quick() -> None:
    start = time.perf_counter()
    read_libraries(sources(Path("/nowhere"), path=tuple(sys.path)), "2.13.0", KNOWN.values())
    assert time.perf_counter() - start < 0.3
