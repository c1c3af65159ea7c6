"""Libraries that compile their kernels at first use, on machines that can't: fake trees, no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from detect_fakes import FakeGpu, FakeNvml, install, sources, version_py, write

import anyattn
from anyattn.api import registry
from anyattn.cli.diagnosis import BackendStatus, LibraryStatus
from anyattn.cli.doctor import diagnose, render
from anyattn.core.capabilities import Phase
from anyattn.core.facts import BuildFault, HostFacts, LibraryState
from anyattn.core.select.decision import Decision, ReasonCode, Rejected
from anyattn.core.select.validate import host_verdict
from anyattn.detect import Sources, detect_host, simulate, with_probes
from anyattn.detect.builds import TOOLKITS
from anyattn.detect.probe import Outcome, ProbeReport
from anyattn.errors import SelectionError

VERSION = "0.7.2.post1"


class Shop:
    """A fake CUDA machine with FlashInfer and Triton, and all that they need to compile."""

    def __init__(self, root: Path) -> None:
        self.root, self.site, self.home = root, root / "site", root / "home"
        self.capability, self.read_only = (9, 0), (root / "nowhere",)
        files = {"torch/__init__.py": "", "torch/version.py": version_py(cuda="13.0")}
        install(self.site, "torch", "2.13.0", files)
        install(self.site, "flashinfer-python", VERSION, {"flashinfer/__init__.py": ""})
        install(self.site, "triton", "3.7.1", {"triton/__init__.py": "", "triton/language.py": ""})
        self.home.mkdir()
        for name in ("ninja", "c++", "gcc"):
            self.program(f"bin/{name}")
        self.toolkit("usr/local/cuda", 13000)
        self.environ = {"PATH": str(root / "bin"), "HOME": str(self.home)}

    def program(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    def toolkit(self, folder: str, version: int) -> Path:
        """A CUDA toolkit; `version` as in CUDART_VERSION."""
        self.program(f"{folder}/bin/nvcc")
        header = f"#include <x>\n#define CUDART_VERSION  {version}\n"
        write(self.root, {f"{folder}/include/cuda_runtime_api.h": header})
        return self.root / folder

    def without(self, *names: str) -> Shop:
        for name in names:
            (self.root / name).unlink()
        return self

    @property
    def sources(self) -> Sources:
        nvml = FakeNvml(FakeGpu("GPU-1", capability=self.capability))
        seen = sources(self.root, self.environ, nvml=nvml, path=(str(self.site),))
        return replace(
            seen,
            writable=lambda folder: (
                seen.writable(folder) and not any(folder.is_relative_to(each) for each in self.read_only)
            ),
        )

    def detect(self) -> HostFacts:
        return detect_host(sources=self.sources)

    def fault(self, library: str = "flashinfer-python") -> BuildFault | None:
        block = self.detect().library(library).block
        return block and block.fault


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_a_machine_that_can_compile(shop: Shop) -> None:
    facts = shop.detect()
    assert facts.target == "cuda:sm90"
    for name in ("flashinfer-python", "triton"):
        assert facts.library(name).state is LibraryState.UNKNOWN
        assert facts.library(name).block is None


def test_no_nvcc(shop: Shop) -> None:
    shop.without("usr/local/cuda/bin/nvcc")
    block = shop.detect().library("flashinfer-python").block
    assert block is not None
    assert block.fault is BuildFault.NO_COMPILER
    assert "no nvcc" in block.detail
    assert "CUDA_HOME" in block.remedy
    assert shop.fault("triton") is None, "Triton brings its own compiler"


@pytest.mark.parametrize("how", ["CUDA_HOME", "CUDA_PATH", "PATH", "FLASHINFER_NVCC"])
def test_where_nvcc_is_found(shop: Shop, how: str) -> None:
    shop.without("usr/local/cuda/bin/nvcc")
    home = shop.toolkit("opt/cuda", 13000)
    value = {"PATH": f"{shop.root / 'bin'}:{home / 'bin'}", "FLASHINFER_NVCC": str(home / "bin/nvcc")}
    shop.environ[how] = value.get(how, str(home))
    assert shop.fault() is None


def test_a_named_toolkit_counts_even_without_a_compiler(shop: Shop) -> None:
    """FlashInfer doesn't look further where CUDA_HOME names a folder."""
    shop.environ["CUDA_HOME"] = str(shop.root / "empty")
    assert shop.fault() is BuildFault.NO_COMPILER


@pytest.mark.parametrize("arch", sorted(TOOLKITS))
def test_a_toolkit_older_than_the_chip(shop: Shop, arch: str) -> None:
    number = int(arch.removeprefix("sm"))
    shop.capability = (number // 10, number % 10)
    major, minor = TOOLKITS[arch]
    exact, older = major * 1000 + minor * 10, 12040 if minor == 8 else 12080
    shop.toolkit("usr/local/cuda", exact)
    assert shop.fault() is None
    shop.toolkit("usr/local/cuda", older)
    assert shop.fault() is BuildFault.OLD_COMPILER
    (shop.root / "usr/local/cuda/include/cuda_runtime_api.h").unlink()
    assert shop.fault() is None, "what can't be read isn't held against it"


@pytest.mark.parametrize("tool", ["ninja", "c++"])
def test_missing_tools(shop: Shop, tool: str) -> None:
    assert shop.without(f"bin/{tool}").fault() is BuildFault.NO_TOOL


def test_another_compiler(shop: Shop) -> None:
    shop.without("bin/c++", "bin/gcc").environ["CXX"] = str(shop.program("bin/g++-14"))
    assert (shop.fault(), shop.fault("triton")) == (None, BuildFault.NO_COMPILER)
    shop.environ["CC"] = str(shop.program("bin/gcc-14"))
    assert shop.fault("triton") is None


def test_a_cache_that_cannot_be_written(shop: Shop) -> None:
    shop.read_only = (shop.home,)
    host = shop.detect()
    for name, variable in (
        ("flashinfer-python", "FLASHINFER_WORKSPACE_BASE"),
        ("triton", "TRITON_CACHE_DIR"),
    ):
        block = host.library(name).block
        assert block is not None
        assert block.fault is BuildFault.CACHE
        assert block.remedy == f"set {variable} to a folder that can be"
        shop.environ[variable] = str(shop.root / "scratch")
        assert shop.fault(name) is None


def test_a_cache_that_is_a_file(shop: Shop) -> None:
    (shop.home / ".cache").write_text("")
    assert shop.fault() is BuildFault.CACHE


def test_compiled_kernels_need_no_compiler(shop: Shop) -> None:
    shop.without("usr/local/cuda/bin/nvcc", "bin/ninja", "bin/gcc")
    assert (shop.fault(), shop.fault("triton")) == (BuildFault.NO_COMPILER, BuildFault.NO_COMPILER)
    write(shop.home, {f".cache/flashinfer/{VERSION}/90a/cached_ops/decode/decode.so": ""})
    write(shop.home, {".triton/cache/ab12/launcher.so": ""})
    assert (shop.fault(), shop.fault("triton")) == (None, None)


def test_kernels_of_another_version_are_none(shop: Shop) -> None:
    shop.without("usr/local/cuda/bin/nvcc")
    write(shop.home, {".cache/flashinfer/0.6.1/90a/cached_ops/decode/decode.so": ""})
    install(shop.site, "flashinfer-jit-cache", "0.6.1+cu130", {"flashinfer_jit_cache/__init__.py": ""})
    assert shop.fault() is BuildFault.NO_COMPILER


@pytest.mark.parametrize("how", ["jit-cache", "ahead of time"])
def test_kernels_that_came_with_it(shop: Shop, how: str) -> None:
    shop.environ["FLASHINFER_DISABLE_JIT"] = "1"
    assert shop.fault() is BuildFault.DISABLED
    if how == "jit-cache":
        files = {"flashinfer_jit_cache/__init__.py": ""}
        install(shop.site, "flashinfer-jit-cache", f"{VERSION}+cu130", files)
    else:
        write(shop.site, {"flashinfer/data/aot/decode/decode.so": ""})
    assert shop.fault() is None
    shop.read_only = (shop.home,)
    assert shop.fault() is BuildFault.CACHE, "importing it writes there all the same"


def test_other_platforms_are_not_asked(shop: Shop) -> None:
    host = detect_host("cpu", sources=shop.without("bin/ninja", "bin/gcc").sources)
    assert host.platform == "cpu"
    assert all(library.block is None for library in host.libraries.values())


def test_a_probe_does_not_lift_the_block(shop: Shop) -> None:
    """Importing proves nothing about compiling."""
    host = shop.without("usr/local/cuda/bin/nvcc").detect()
    facts = replace(host.library("flashinfer-python"), state=LibraryState.USABLE)
    probed = with_probes(host, [ProbeReport(facts, Outcome.USABLE)])
    assert probed.library("flashinfer-python").block is not None


# -- what follows from it --------------------------------------------------------------------------------


def blocked(shop: Shop) -> HostFacts:
    """An H200 as simulated, but for what this shop says of FlashInfer."""
    host = simulate("cuda:sm90")
    libraries = dict(host.libraries)
    libraries["flashinfer-python"] = shop.detect().library("flashinfer-python")
    return replace(host, libraries=libraries)


def choose(host: HostFacts, **wishes: str) -> Decision:
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    return anyattn.select(spec, dtype="bfloat16", host=host, **wishes)


@pytest.fixture
def without_nvcc(shop: Shop) -> HostFacts:
    return blocked(shop.without("usr/local/cuda/bin/nvcc"))


def test_automatic_choice_goes_on(shop: Shop, without_nvcc: HostFacts) -> None:
    flashinfer = {"flashinfer"}
    able = host_verdict(registry().get("flashinfer"), Phase.DECODE, simulate("cuda:sm90"))
    assert not isinstance(able, Rejected), "it could have been chosen"
    decision = choose(without_nvcc)
    assert not flashinfer & {decision.prefill.backend, decision.decode.backend}
    assert "can't compile its kernels" in str(decision)


def test_explicit_choice_refuses(without_nvcc: HostFacts) -> None:
    with pytest.raises(SelectionError, match="library_blocked") as caught:
        choose(without_nvcc, backend="flashinfer")
    text = str(caught.value)
    assert "no nvcc" in text
    assert "CUDA_HOME" in text
    assert "the nearest that would do" in text


def test_the_reason_is_typed_and_survives_json(without_nvcc: HostFacts) -> None:
    verdict = host_verdict(registry().get("flashinfer"), Phase.DECODE, without_nvcc)
    assert isinstance(verdict, Rejected)
    assert ReasonCode.LIBRARY_BLOCKED in {reason.code for reason in verdict.reasons}
    decision = choose(without_nvcc)
    again = Decision.from_json(decision.to_json())
    block = again.host.library("flashinfer-python").block
    assert block == without_nvcc.library("flashinfer-python").block
    assert block is not None


def states(host: HostFacts) -> tuple[LibraryStatus, BackendStatus, str]:
    diagnosis = diagnose(host)
    library = next(s for s in diagnosis.libraries if s.distribution == "flashinfer-python")
    backend = next(s for s in diagnosis.backends if s.backend == "flashinfer")
    return library, backend, render(diagnosis)


def test_doctor_says_so_with_the_remedy(without_nvcc: HostFacts) -> None:
    library, backend, text = states(without_nvcc)
    assert library.state == "blocked"
    assert "no nvcc" in (library.reason or "")
    assert (backend.status, backend.phases) == ("lacking", ())
    assert backend.remedy == library.remedy
    assert f"-> {library.remedy}" in text


@pytest.mark.parametrize(
    ("state", "version", "code"),
    [
        (LibraryState.MISSING, None, ReasonCode.LIBRARY_MISSING),
        (LibraryState.BROKEN, VERSION, ReasonCode.LIBRARY_BROKEN),
        (LibraryState.UNKNOWN, "0.2.5", ReasonCode.LIBRARY_VERSION),
    ],
)
def test_the_other_states(state: LibraryState, version: str | None, code: ReasonCode) -> None:
    """Missing, broken, too old: doctor has a remedy, automatic choice goes on, an explicit one is refused."""
    host = simulate("cuda:sm90")
    facts = replace(host.library("flashinfer-python"), state=state, version=version, reason="it fails")
    host = replace(host, libraries={**host.libraries, "flashinfer-python": facts})
    library, backend, _ = states(host)
    assert backend.status == "lacking"
    assert backend.remedy
    assert library.state == {LibraryState.UNKNOWN: "installed"}.get(state, state.value)
    decision = choose(host)
    assert "flashinfer" not in {decision.prefill.backend, decision.decode.backend}
    with pytest.raises(SelectionError, match=code.value):
        choose(host, backend="flashinfer")
