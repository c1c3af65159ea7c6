"""Real probes of fake libraries: each misbehaves in its own way, in a child process."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from detect_fakes import install, sources

from anyattn.core.facts import HostFacts, LibraryState
from anyattn.detect import (
    KNOWN,
    Library,
    Outcome,
    ProbeReport,
    Sources,
    detect_host,
    kept_probes,
    probe,
    probe_all,
    with_probes,
)
from anyattn.detect.cache import cache_folder, load, store
from anyattn.detect.child import attempt
from anyattn.errors import UnknownNameError

STANDARD = tuple(p for p in sys.path if Path(p, "os.py").exists() or p.endswith("lib-dynload"))
"""Folders of the standard library."""

FINE = "attention_decode_bf16 = print"


class Lab:
    """A fake site-packages with a fake torch, and a cache folder."""

    def __init__(self, root: Path) -> None:
        self.root, self.site = root, root / "site"
        self.environ = {**os.environ, "ANYATTN_CACHE_DIR": str(root / "cache")}
        self.torch("__version__ = '2.13.0'")

    def torch(self, text: str) -> None:
        path = self.site / "torch/__init__.py"
        if path.exists():
            path.write_text(text)
        else:
            install(self.site, "torch", "2.13.0", {"torch/__init__.py": text})

    def library(self, text: str, name: str = "hpc-ops", module: str = "hpc", version: str = "0.0.1") -> None:
        install(self.site, name, version, {f"{module}/__init__.py": text})

    @property
    def sources(self) -> Sources:
        return sources(self.root, self.environ, path=(str(self.site), *STANDARD))

    @property
    def host(self) -> HostFacts:
        return detect_host(sources=self.sources)

    def probe(
        self, name: str | Library = "hpc-ops", *, timeout: float = 20.0, fresh: bool = False
    ) -> ProbeReport:
        return probe(name, self.host, timeout=timeout, sources=self.sources, fresh=fresh)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def test_a_usable_library(lab: Lab) -> None:
    lab.library(f"print('noise'); {FINE}")
    report = lab.probe()
    assert (report.outcome, report.facts.state) == (Outcome.USABLE, LibraryState.USABLE)
    assert (report.facts.version, report.facts.modules) == ("0.0.1", ("hpc",))
    assert (report.detail, report.remedy, report.cached, report.note) == ("", None, False, None)
    assert 0 < report.seconds < 20


@pytest.mark.parametrize(
    ("text", "outcome", "detail"),
    [
        (
            "raise RuntimeError('ROCm version file not found')",
            Outcome.EXCEPTION,
            "import hpc: RuntimeError: ROCm",
        ),
        ("raise AssertionError('Expected one _C*.so')", Outcome.EXCEPTION, "AssertionError: Expected one"),
        ("raise AttributeError('a')", Outcome.EXCEPTION, "AttributeError: a"),
        ("raise KeyboardInterrupt", Outcome.EXCEPTION, "KeyboardInterrupt"),
        ("raise OSError('libcudart.so.13: cannot open shared object file')", Outcome.EXCEPTION, "libcudart"),
        ("raise ImportError('libhccl.so')", Outcome.IMPORT_ERROR, "ImportError: libhccl.so"),
        ("import cutlass", Outcome.IMPORT_ERROR, "No module named 'cutlass'"),
        ("raise SystemExit(127)", Outcome.EXIT, "SystemExit: 127"),
        ("print('no AVX2 here'); raise SystemExit", Outcome.EXIT, "SystemExit"),
        ("import os; os._exit(3)", Outcome.EXIT, "the process ended with code 3"),
        (
            "import os; print('bye', flush=True); os._exit(0)",
            Outcome.EXIT,
            "the process ended with code 0 (bye)",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Outcome.SIGNAL, "killed by SIGSEGV"),
        ("import os; os.abort()", Outcome.SIGNAL, "killed by SIGABRT"),
        ("x = 1", Outcome.EXCEPTION, "look up hpc.attention_decode_bf16: AttributeError"),
        ("class E(Exception):\n def __str__(self): return 'x' * 10**6\nraise E", Outcome.EXCEPTION, "xxx"),
        ("this isn't Python", Outcome.EXCEPTION, "SyntaxError"),
    ],
)
def test_whatever_an_import_does(lab: Lab, text: str, outcome: Outcome, detail: str) -> None:
    lab.library(text)
    report = lab.probe()
    assert report.outcome is outcome, report
    assert report.facts.state is LibraryState.BROKEN
    assert detail in report.detail
    assert report.facts.reason == report.detail
    assert len(report.detail) < 1200
    assert report.remedy


def test_an_import_that_hangs(lab: Lab) -> None:
    lab.library("import time; time.sleep(60)")
    start = time.monotonic()
    report = lab.probe(timeout=0.6)
    assert time.monotonic() - start < 5
    assert (report.outcome, report.facts.state) == (Outcome.TIMEOUT, LibraryState.BROKEN)
    assert report.detail == "import hpc: not done after 0.6 s"
    assert "--timeout" in (report.remedy or "")
    assert not lab.probe(timeout=0.6).cached, "running out of time says nothing about the next time"


def test_a_child_s_child_does_not_keep_the_probe(lab: Lab) -> None:
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    lab.library(f"{code}\nimport time; time.sleep(60)")
    start = time.monotonic()
    assert lab.probe(timeout=0.6).outcome is Outcome.TIMEOUT
    assert time.monotonic() - start < 5


def test_a_torch_that_does_not_import(lab: Lab) -> None:
    lab.torch("raise RuntimeError('Failed to load the backend extension: torch_npu')")
    lab.library(FINE)
    report = lab.probe()
    assert report.outcome is Outcome.TORCH
    assert report.detail.startswith("import torch: RuntimeError")
    assert "pip uninstall torch-npu" in (report.remedy or "")
    torch = lab.probe("torch")
    assert (torch.outcome, torch.facts.state) == (Outcome.TORCH, LibraryState.BROKEN)


def test_libraries_without_torch_do_not_import_it(lab: Lab) -> None:
    lab.torch("raise RuntimeError")
    install(lab.site, "triton", "3.7.1", {"triton/__init__.py": "", "triton/language.py": ""})
    assert lab.probe("triton").outcome is Outcome.USABLE


def test_a_missing_requirement_names_the_library_that_has_it(lab: Lab) -> None:
    install(lab.site, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/__init__.py": ""})
    report = lab.probe("flash-attn-4")
    assert report.outcome is Outcome.IMPORT_ERROR
    assert report.remedy == KNOWN["nvidia-cutlass-dsl"].remedy


def test_a_missing_requirement_that_nobody_knows(lab: Lab) -> None:
    lab.library("import some_thing.deep")
    assert lab.probe().remedy == "pip install some-thing"


def test_a_library_for_other_hardware_needs_no_remedy(lab: Lab) -> None:
    lab.library("raise ImportError('libc10_cuda.so: cannot open shared object file: No such file')")
    assert "nothing to do here: it is for cuda" in (lab.probe().remedy or "")


def test_missing_and_unknown(lab: Lab) -> None:
    report = lab.probe("flashinfer_python")
    assert (report.outcome, report.facts.state) == (Outcome.MISSING, LibraryState.MISSING)
    assert report.remedy == "pip install flashinfer-python==0.7.2.post1"
    with pytest.raises(UnknownNameError, match="did you mean 'flashinfer-python'"):
        lab.probe("flashinfer-pythn")


def test_a_module_of_somebody_else_is_not_imported(lab: Lab) -> None:
    install(lab.site, "sgl-flash-mla", "1.0.0", {"flash_mla/__init__.py": "x = 1"})
    install(lab.site, "tokenspeed-flashmla", "1.0.0", {"flash_mla/__init__.py": "raise SystemExit"})
    report = lab.probe("sgl-flash-mla")
    assert (report.outcome, report.facts.state) == (Outcome.SHADOWED, LibraryState.UNKNOWN)
    assert report.seconds == 0
    assert "tokenspeed-flashmla" in report.detail
    assert report.remedy == "pip install --force-reinstall --no-deps sgl-flash-mla==1.0.0"


def test_a_torch_that_shadows_the_distribution_is_tried(lab: Lab) -> None:
    other = lab.root / "other"
    (other / "torch").mkdir(parents=True)
    (other / "torch/__init__.py").write_text("raise RuntimeError('mine')")
    seen = sources(lab.root, lab.environ, path=(str(other), str(lab.site), *STANDARD))
    report = probe("torch", detect_host(sources=seen), sources=seen)
    assert report.facts.state is LibraryState.BROKEN
    assert "RuntimeError: mine" in report.detail
    assert "shadowed by" in report.detail


def test_a_plugin_s_library(lab: Lab) -> None:
    acme = Library(
        distribution="acme-attn", modules=("acme",), platforms=("cuda",), recorded=None, provides="kernels"
    )
    install(lab.site, "acme-attn", "1.2", {"acme/__init__.py": "raise ValueError('no device')"})
    host = detect_host(sources=lab.sources, extra=[acme])
    report = probe(acme, host, sources=lab.sources)
    assert (report.outcome, report.facts.version) == (Outcome.EXCEPTION, "1.2")


def marked(lab: Lab) -> Path:
    """A library that leaves a trace each time it is imported."""
    trace = lab.root / "trace"
    lab.library(f"open({str(trace)!r}, 'a').write('x'); {FINE}")
    return trace


def test_results_are_kept(lab: Lab) -> None:
    trace = marked(lab)
    first, second = lab.probe(), lab.probe()
    assert (first.cached, second.cached) == (False, True)
    assert trace.read_text() == "x"
    assert second.facts == first.facts
    assert lab.probe(fresh=True).cached is False
    assert trace.read_text() == "xx"


def test_a_broken_result_is_kept_with_its_remedy(lab: Lab) -> None:
    lab.library("import cutlass")
    first, second = lab.probe(), lab.probe()
    assert second.cached
    assert (second.outcome, second.detail, second.remedy) == (first.outcome, first.detail, first.remedy)


def test_another_version_is_another_result(lab: Lab) -> None:
    trace = marked(lab)
    lab.probe()
    for name in ("hpc_ops-0.0.1.dist-info", "torch-2.13.0.dist-info"):
        folder = lab.site / name
        text = (folder / "METADATA").read_text().replace("Version: ", "Version: 9.", 2)
        stamp = os.stat(lab.site).st_mtime_ns
        (folder / "METADATA").write_text(text)
        os.utime(lab.site, ns=(stamp, stamp))
        assert not lab.probe().cached
        assert lab.probe().cached
    assert trace.read_text() == "xxx"


def test_installing_something_else_asks_again(lab: Lab) -> None:
    lab.library("import cutlass; from cutlass import ok; attention_decode_bf16 = ok")
    assert lab.probe().outcome is Outcome.IMPORT_ERROR
    install(lab.site, "nvidia-cutlass-dsl", "4.8.1", {"cutlass/__init__.py": "ok = 1"})
    assert lab.probe().outcome is Outcome.USABLE


@pytest.mark.parametrize("text", ["", "{}", '{"key": 1}', "[]", '{"key": {}, "value": {"outcome": "odd"}}'])
def test_a_damaged_cache_is_ignored(lab: Lab, text: str) -> None:
    marked(lab)
    lab.probe()
    (file,) = (lab.root / "cache/probes").iterdir()
    if "odd" in text:
        text = json.dumps({**json.loads(file.read_text()), "value": {"outcome": "odd"}})
    file.write_text(text)
    report = lab.probe()
    assert (report.outcome, report.cached) == (Outcome.USABLE, False)


def test_a_cache_that_cannot_be_written_is_a_note(lab: Lab) -> None:
    lab.library(FINE)
    (lab.root / "file").write_text("")
    lab.environ["ANYATTN_CACHE_DIR"] = str(lab.root / "file")  # a folder can't be made here, not even by root
    report = lab.probe()
    assert report.outcome is Outcome.USABLE
    assert "set ANYATTN_CACHE_DIR" in (report.note or "")


def test_no_child_process_at_all(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.library(FINE)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    report = lab.probe()
    assert (report.outcome, report.facts.state) == (Outcome.NOT_STARTED, LibraryState.BROKEN)


def test_probing_everything(lab: Lab) -> None:
    lab.library(FINE)
    install(lab.site, "wave-lang", "3.9.1", {"wave_lang/__init__.py": "raise SystemExit"})
    host, seen = lab.host, []
    reports = probe_all(
        host, sources=lab.sources, timeout=20, done=lambda r: seen.append(r.facts.distribution)
    )
    assert [r.facts.distribution for r in reports] == ["torch", "hpc-ops", "wave-lang"]
    assert sorted(seen) == ["hpc-ops", "torch", "wave-lang"]
    probed = with_probes(host, reports)
    assert probed.library("hpc-ops").state is LibraryState.USABLE
    assert probed.library("wave-lang").state is LibraryState.BROKEN
    assert host.library("wave-lang").state is LibraryState.UNKNOWN, "facts are never changed in place"


def test_the_parent_imports_nothing(lab: Lab) -> None:
    lab.library(FINE)
    lab.probe()
    assert "hpc" not in sys.modules


def test_an_attempt_sees_only_its_path(tmp_path: Path) -> None:
    done = attempt(["pytest"], path=[str(tmp_path)], environ=os.environ, timeout=20)
    assert done.outcome is Outcome.IMPORT_ERROR
    assert done.missing == "pytest"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"ANYATTN_CACHE_DIR": "/a/b"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/anyattn"),
        ({"HOME": "/h"}, "/h/.cache/anyattn"),
        ({"ANYATTN_CACHE_DIR": "", "HOME": "/h"}, "/h/.cache/anyattn"),
    ],
)
def test_cache_folders(environ: dict[str, str], folder: str) -> None:
    assert cache_folder(environ) == Path(folder)


def test_keys_are_told_apart(tmp_path: Path) -> None:
    assert store(tmp_path / "c", "name", {"a": 1}, {"v": 2}) is None
    assert load(tmp_path / "c", "name", {"a": 1}) == {"v": 2}
    assert load(tmp_path / "c", "name", {"a": 2}) is None
    assert [p.suffix for p in (tmp_path / "c").iterdir()] == [".json"], "no half-written files stay behind"


def test_earlier_results_are_found_without_probing(lab: Lab) -> None:
    lab.library("raise OSError('libcudart.so.13: cannot open shared object file')")
    assert kept_probes(lab.host, sources=lab.sources) == ()
    lab.probe()
    (report,) = kept_probes(lab.host, sources=lab.sources)
    assert (report.cached, report.outcome) == (True, Outcome.EXCEPTION)
    facts = with_probes(lab.host, [report]).library("hpc-ops")
    assert facts.state is LibraryState.BROKEN
    assert "libcudart.so.13" in (facts.reason or "")
    lab.library(FINE, version="0.0.2")  # another version: the old result says nothing about it
    assert kept_probes(lab.host, sources=lab.sources) == ()
