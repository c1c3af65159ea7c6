"""`anyattn lint`: every rule, what it must not say, allow comments, and our own package."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import anyattn
from anyattn.cli.main import main
from anyattn.errors import ConfigError
from anyattn.testing.lint import Finding, lint_paths
from anyattn.testing.lint_rules import RULES

HEADER = """\
import torch
import torch.nn.functional as F
import numpy as np


def fill_in_graph(plan, x: torch.Tensor, n: int, maybe: torch.Tensor | None, parts: list[torch.Tensor]):
"""


def lint_body(tmp_path: Path, body: str) -> list[Finding]:
    path = tmp_path / "sample.py"
    path.write_text(HEADER + textwrap.indent(textwrap.dedent(body), "    ") + "\n")
    return list(lint_paths([path]).findings)


def rules_of(tmp_path: Path, body: str) -> list[str]:
    return [f.rule for f in lint_body(tmp_path, body)]


SYNCS = (
    "x.item()", "x.max().item()", "plan.anything.tolist()", "x.cpu()", "x.numpy()", "bool(x)", "int(x[0])",
    "float(x.sum())", "range(x[0])", "print(x)", "f'{x}'", "str(x)", "max(x)", "torch.equal(x, x)",
    "torch.allclose(x, x)", "torch.cuda.synchronize()", "plan.event.synchronize()", "x.to('cpu')",
    "x.to(device='cpu')", "x.to(torch.device('cpu'))", "torch.tensor([1, 2])", "torch.as_tensor([n])",
    "x.new_tensor([1])", "torch.from_numpy(plan.host)", "x.pin_memory()", "np.asarray(x)", "y = x[: x[0]]",
    "1 in x", "int(plan.seq_lens[0])", "[int(p) for p in parts]", "x[0] = 5", "x[-1] = -1.0",
    "for p in parts:\n    p.item()", "a, b = x.chunk(2)\nint(a)", "y = x + 1\nint(y)",
    "if n:\n    y = x\nelse:\n    y = x + 1\nfloat(y)", "def inner():\n    return x.item()", "print(maybe)",
    "with plan.timer():\n    x.item()", "y = [x]\nint(y[0])",
)  # fmt: skip
BRANCHES = (
    "if x:\n    pass", "if x.any():\n    pass", "while x.sum() > 0:\n    pass", "assert x.all()",
    "y = 1 if x[0] else 2", "y = x.any() and n", "y = not x", "if plan.seq_lens.max() > n:\n    pass",
    "if maybe:\n    pass", "if torch.isnan(x).any():\n    pass", "y = [p for p in parts if p.any()]",
    "if x or n:\n    pass",
)  # fmt: skip
SHAPES = (
    "x.nonzero()", "torch.nonzero(x)", "torch.argwhere(x)", "x.masked_select(x > 1)", "x.unique()",
    "torch.unique_consecutive(x)", "torch.bincount(x)", "torch.where(x > 1)", "x[x > 1]", "y = x > 1\nx[y]",
    "x[~(x > 1)]", "x[x > 1] = x", "x.repeat_interleave(x)", "torch.repeat_interleave(x, x)",
    "torch.tensor_split(x, x)", "F.one_hot(x)", "x[0, x[0] > 1]", "x[x.isnan()]", "x[x > 1] += 1",
)  # fmt: skip
ALLOCATIONS = (
    "torch.empty(3)", "torch.zeros(3)", "torch.arange(3)", "torch.cat([x, x])", "torch.stack(parts)",
    "torch.zeros_like(x)", "x.clone()", "x.to(plan.device)", "x.to(torch.int64)", "x.contiguous()",
    "x.long()", "x.float()", "x.new_zeros(3)", "torch.full((3,), 1)", "x.repeat(2)",
    "torch.repeat_interleave(x, 2)", "(x > 1).int()", "plan.seq_lens.long()",
)  # fmt: skip
FINE = (
    "torch.cumsum(x, 0, out=plan.out)", "x.add_(1)", "plan.out.copy_(x)", "torch.cat([x, x], out=plan.out)",
    "if n:\n    pass", "if maybe is not None:\n    pass", "if maybe is None or n:\n    pass", "x.shape[0]",
    "if x.shape[0] > 1:\n    pass", "if x.dtype == torch.int32:\n    pass", "int(x.shape[0])",
    "range(x.numel())", "if x.is_contiguous():\n    pass", "x[n]", "x[: x.shape[0]]", "x[1:] = 0",
    "x[:1].fill_(0)", "x[x > 1] = 0", "x[x > 1] = -torch.inf", "torch.where(x > 1, x, 0, out=plan.out)",
    "if parts:\n    pass", "len(parts)", "if n in (1, 2):\n    pass",
    "if isinstance(x, torch.Tensor):\n    pass", "plan.items()", "x.masked_fill_(x > 1, 0)", "str(n)",
    "int(n)", "assert maybe is not None", "if torch.is_tensor(plan):\n    pass", "if not parts:\n    pass",
    "for i in range(n):\n    x[i : i + 1].zero_()", "', '.join(str(i) for i in range(n))",
    "if plan.host_seq_lens:\n    pass", "sum(plan.host_seq_lens)", "if plan.max_kv_len > 3:\n    pass",
    "y = x if n else None", "if x.device.type == 'cuda':\n    pass",
)  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "body"),
    [
        *(("host-sync", body) for body in SYNCS),
        *(("tensor-branch", body) for body in BRANCHES),
        *(("dynamic-shape", body) for body in SHAPES),
        *(("allocation", body) for body in ALLOCATIONS),
    ],
)
def test_found(rule: str, body: str, tmp_path: Path) -> None:
    assert rule in rules_of(tmp_path, body)


@pytest.mark.parametrize("body", FINE)
def test_not_found(body: str, tmp_path: Path) -> None:
    assert lint_body(tmp_path, body) == []


def test_every_rule_has_a_sample() -> None:
    assert len(SYNCS) + len(BRANCHES) + len(SHAPES) + len(ALLOCATIONS) > 80
    assert len({rule.code for rule in RULES.values()}) == len(RULES)


def lint_module(tmp_path: Path, source: str, name: str = "module.py") -> list[Finding]:
    path = tmp_path / name
    path.write_text(textwrap.dedent(source))
    return list(lint_paths([path]).findings)


def test_only_graph_code_and_what_it_calls(tmp_path: Path) -> None:
    found = lint_module(
        tmp_path,
        """
        def outside(x): return x.item()

        def helper(x): return deeper(x)

        def deeper(x): return x.tolist()

        class Base:
            def inherited(self, x): x.cpu()

        class Mine(Base):
            def init_forward_metadata_in_graph(self, plan):
                self.own(plan)
                self.inherited(plan)
                helper(plan)

            def own(self, x): x.numpy()

            def init_forward_metadata_out_graph(self, x): x.item()

        class Other:
            def own(self, x): x.item()

        def marked(  # anyattn: in-graph
            x,
        ): x.item()
        """,
    )
    assert [f.function for f in found] == ["deeper", "Base.inherited", "Mine.own", "marked"]
    assert {f.root for f in found[:3]} == {"Mine.init_forward_metadata_in_graph"}
    assert "called from Mine.init_forward_metadata_in_graph" in str(found[0])
    assert str(found[3]).split(": ")[1] == "AG001 host-sync"


def test_annotations_of_other_files_are_known(tmp_path: Path) -> None:
    (tmp_path / "types_.py").write_text("class Step:\n    lens: Tensor\n    count: int\n")
    (tmp_path / "code.py").write_text(
        "def fill_in_graph(step):\n    if step.lens:\n        pass\n    if step.count:\n        pass\n"
    )
    report = lint_paths([tmp_path])
    assert [(f.rule, f.line) for f in report.findings] == [("tensor-branch", 2)]
    assert (report.files, report.functions) == (2, 1)


ALLOWED = """
def fill_in_graph(x):
    x.item()  # anyattn: allow(host-sync) a host tensor
    # anyattn: allow(AG001, allocation) read once

    y = x.clone().item()
    x.item()
"""


def test_allow_comments(tmp_path: Path) -> None:
    assert [f.line for f in lint_module(tmp_path, ALLOWED)] == [7]


@pytest.mark.parametrize(
    ("comment", "rule", "words"),
    [
        ("allow(host-sync)", "bad-allow", "give a reason"),
        ("allow(host-sink) because", "bad-allow", "unknown rule host-sink"),
        ("allow because", "bad-allow", "no rule named"),
        ("allow() because", "bad-allow", "no rule named"),
    ],
)
def test_allow_comments_that_allow_nothing(comment: str, rule: str, words: str, tmp_path: Path) -> None:
    found = lint_module(tmp_path, f"def fill_in_graph(x):\n    x.item()  # anyattn: {comment}\n")
    assert {f.rule for f in found} == {"host-sync", rule}
    assert any(words in f.message for f in found)


def test_an_allow_comment_that_nobody_needs(tmp_path: Path) -> None:
    (found,) = lint_module(tmp_path, "def f_in_graph(x):\n    x.add_(1)  # anyattn: allow(host-sync) why\n")
    assert (found.rule, found.severity) == ("unused-allow", "warning")
    assert lint_module(tmp_path, 'def f_in_graph(x):\n    return "# anyattn: allow(none)"\n') == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\n\n\ndef fill_in_graph(x):\n    torch.zeros(3)\n    x.item()\n")
    assert main(["lint", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}:5:5: AG004 allocation: torch.zeros()")
    assert lines[1].startswith(f"{path}:6:5: AG001 host-sync: .item()")
    assert lines[-1] == "1 functions in graphs, in 1 files: 1 errors, 1 warnings"
    assert main(["lint", "--quiet", str(path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    path.write_text("import torch\n\n\ndef fill_in_graph(x):\n    torch.zeros(3)\n")
    assert main(["lint", str(path)]) == 0
    capsys.readouterr()
    assert main(["lint", "--strict", "--json", str(path)]) == 1
    data = json.loads(capsys.readouterr().out)
    assert {k: data[k] for k in ("schema", "files", "errors", "warnings")} == {
        "schema": 1, "files": 1, "errors": 0, "warnings": 1,
    }  # fmt: skip
    assert data["findings"][0]["code"] == "AG004"
    assert data["findings"][0]["line"] == 5
    assert main(["lint", "--rules"]) == 0
    assert capsys.readouterr().out.count("\n") == len(RULES)


def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for paths in ([], [str(tmp_path / "missing")], [str(tmp_path / "missing.py")]):
        assert main(["lint", *paths]) == 2
        line = capsys.readouterr().err
        assert "asked: " in line
        assert "Next: " in line
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="nothing to lint"):
        lint_paths([tmp_path / "notes.txt"])


def test_files_that_are_no_python_and_folders_that_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    for folder in (".venv", "build", "__pycache__"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("def f_in_graph(x): x.item()\n")
    report = lint_paths([tmp_path])
    assert [f.rule for f in report.findings] == ["unreadable", "unreadable"]
    assert report.errors == 2


def test_our_own_package_passes() -> None:
    report = lint_paths([Path(anyattn.__file__).parent])
    errors = [str(f) for f in report.findings if f.severity == "error"]
    assert not errors, "\n".join(errors)
    assert report.functions >= 40, "the marks on our own device half are gone"


def test_it_works_without_torch(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def fill_in_graph(x):\n    x.item()\n")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from anyattn.cli.main import main; raise SystemExit(main(['lint', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "AG001" in done.stdout
