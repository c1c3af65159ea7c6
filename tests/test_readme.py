"""README and docs: the quick start runs, commands parse, generated parts are fresh, links lead somewhere."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import types
from pathlib import Path

import pytest
import torch

from anyattn.catalog import records
from anyattn.cli.main import COMMANDS, _load
from anyattn.cli.matrix_support import read_csv
from anyattn.core.select.decision import Decision
from anyattn.env import VARIABLES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCKS if name == language]


def update() -> types.ModuleType:
    """docs/update.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("docs_update", ROOT / "docs" / "update.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quick_start_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    decision, out, lse = names["decision"], names["out"], names["lse"]
    assert isinstance(decision, Decision)
    assert str(decision) in capsys.readouterr().out
    assert isinstance(out, torch.Tensor)
    assert isinstance(lse, torch.Tensor)
    assert (out.shape, lse.shape, lse.dtype) == ((1, 32, 128), (1, 32), torch.float32)
    assert bool(out.isfinite().all())
    # 38 keys with logits around N(0, 1): their log-sum-exp is near log 38 + 1/2
    assert 3.0 < float(lse.mean()) < 5.5


def test_what_comes_from_data_is_fresh() -> None:
    stale = [str(path.relative_to(ROOT)) for path in update().stale()]
    assert not stale, f"{', '.join(stale)}: run `make docs`"


def test_the_table_names_every_backend_once_for_each_kind() -> None:
    table = update().support_table()
    built, planned = table.split("Not built yet")
    for record in records():
        for kind in record.row_kinds():
            where = built if kind in record.targets else planned
            lines = [line for line in where.splitlines() if line.startswith(f"| `{record.name}` |")]
            assert any(kind.value in line.split("|")[2] for line in lines), (record.name, kind)
    assert "run on the chip" not in planned


def test_the_table_says_of_each_chip_what_the_results_say() -> None:
    """README and docs/support.md have one source: `ci/results`."""
    module = update()
    names = {name: platform for platform, name in module.PLATFORMS.items()}
    told: dict[tuple[str, str, str, str], str] = {}
    for line in module.support_table().split("Not built yet")[0].splitlines():
        if line.startswith("| `"):
            backend, kind, platform, proofs = (part.strip(" `") for part in line.strip("| ").split(" | "))
            for chips, words in (group.split(": ", 1) for group in proofs.split("; ")):
                for chip in chips.split(", "):
                    told[backend, kind, names[platform], chip] = words
    cells = read_csv((ROOT / "ci" / "support.csv").read_text(encoding="utf-8"))
    assert set(told) == {cell.key for cell in cells}
    for cell in cells:
        words = module.WORDS[cell.status]
        if cell.status == "failing":
            words = f"{words} ({cell.evidence.replace('; ', ', ')})"
        assert told[cell.key] == words, cell.key


def command_lines() -> list[str]:
    text = "\n".join([*blocks("sh"), *(path.read_text(encoding="utf-8") for path in PAGES)])
    found = re.findall(r"^(?: {4})?(anyattn [a-z].*?)(?: {2,}#.*)?$", text, re.MULTILINE)
    return sorted(set(found))


@pytest.mark.parametrize("line", command_lines())
def test_commands_of_the_docs_parse(line: str) -> None:
    _, command, *options = shlex.split(line)
    module = _load(command)
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, conflict_handler="resolve")
    parser.add_argument("--json", action="store_true")
    module.add_arguments(parser)
    parser.parse_args(options)


def test_every_command_is_in_the_readme() -> None:
    lines = command_lines()
    assert len(lines) >= 8
    for command in COMMANDS:
        assert any(line.split()[1] == command for line in lines), command


def test_make_targets_of_the_docs_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([\w-]+)`", page.read_text("utf-8"))}
    named |= set(re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_and_variables(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(((?!https:)[^)#]+?)(?:#[\w-]+)?\)", text):
        assert (page.parent / target).exists(), target
    assert set(re.findall(r"ANYATTN_[A-Z_]*[A-Z]", text)) <= set(VARIABLES)
    for path in re.findall(r"`((?:anyattn|tests|examples|benchmarks|ci|docs)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
