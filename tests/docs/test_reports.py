"""docs/reports.md: tests that it names exist, reports have their links, claims have their tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reports.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^- .*?(?=^- |^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
NAMED = sorted(set(re.findall(r"`(tests/[\w/.]+::\w+)`", TEXT)))


@functools.cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("named", NAMED)
def test_named_tests_exist(named: str) -> None:
    path, _, name = named.partition("::")
    assert name.startswith("test_")
    assert name in functions(path)


def test_every_mention_of_a_test_is_one() -> None:
    """Nothing that looks like a test is spelt in another way, and so left unchecked."""
    assert len(NAMED) > 50
    loose = {word for word in re.findall(r"\btest_\w+", TEXT) if not word.endswith("_py")}
    known = {part.partition("::")[2] for part in NAMED} | {
        Path(part.partition("::")[0]).stem for part in NAMED
    }
    assert loose <= known


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry[3:].partition("]")[0])
def test_entries_are_whole(entry: str) -> None:
    links = re.findall(r"\[([\w.-]+)#(\d+)\]\(https://github\.com/[\w.-]+/([\w.-]+)/issues/(\d+)\)", entry)
    assert links
    assert entry.count("](") == len(links)
    for project, number, repository, linked in links:
        assert number == linked
        assert project == repository
    assert "*Here:*" in entry or "*Open:*" in entry
    assert ("*Here:*" in entry) == ("*Tests:*" in entry), "what is claimed is shown"


def test_no_report_is_told_twice() -> None:
    reports = [name for entry in ENTRIES for name in re.findall(r"\[([\w.-]+#\d+)\]", entry)]
    assert len(reports) > 100
    assert len(reports) == len(set(reports))
