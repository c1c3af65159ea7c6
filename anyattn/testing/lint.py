"""Lints the code that runs inside graphs: files, allow comments, findings. Needs no torch.

A line is excused by a comment on it, or on the line above, that names rules and gives a reason:
`# anyattn: allow(allocation) once a process, at the first capture`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from anyattn.errors import ConfigError
from anyattn.testing.lint_rules import RULES, check_function
from anyattn.testing.lint_scopes import graph_functions
from anyattn.testing.lint_tensors import Known

__all__ = ["SCHEMA", "Finding", "LintReport", "lint_paths"]

SCHEMA = 1
_ALLOW = re.compile(r"#\s*anyattn:\s*allow\b\s*(?:\(([^)]*)\))?\s*(.*)")
_SKIPPED = frozenset(("__pycache__", "build", "dist", "node_modules", "site-packages"))
_VOCABULARY = ("plan.py", "batch.py")  # core's own records: their tensors are known to every linted file


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule. `root`: the `*_in_graph` function (or marked one) that leads to `function`."""

    path: str
    line: int
    column: int
    code: str
    rule: str
    severity: str
    message: str
    function: str = ""
    root: str = ""

    def __str__(self) -> str:
        via = f", called from {self.root}" if self.root != self.function else ""
        place = f" (in {self.function}{via})" if self.function else ""
        return f"{self.path}:{self.line}:{self.column}: {self.code} {self.rule}: {self.message}{place}"


@dataclass(frozen=True)
class LintReport:
    """What was looked at, and what was found."""

    files: int
    functions: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        """How many findings are errors."""
        return sum(f.severity == "error" for f in self.findings)

    @property
    def warnings(self) -> int:
        """How many are warnings."""
        return len(self.findings) - self.errors

    def to_json(self) -> dict[str, object]:
        """Schema 1."""
        return {
            "schema": SCHEMA,
            "files": self.files,
            "functions": self.functions,
            "errors": self.errors,
            "warnings": self.warnings,
            "findings": [asdict(f) for f in self.findings],
        }


def lint_paths(paths: Sequence[str | Path]) -> LintReport:
    """Lint files, and all Python files below folders (hidden ones and build outputs left out).

    Raises:
        ConfigError: a path that isn't there, or a file that isn't `*.py`.
    """
    files = list(dict.fromkeys(file for path in paths for file in _files(Path(path))))
    parsed, findings = [], []
    for file in files:
        try:
            source = file.read_text(encoding="utf-8")
            parsed.append((file, source, ast.parse(source)))
        except (SyntaxError, ValueError) as error:
            line = (error.lineno if isinstance(error, SyntaxError) else None) or 1
            findings.append(_finding(str(file), line, 1, "unreadable", f"{type(error).__name__}: {error}"))
    known = Known()
    for tree in (*_vocabulary(), *(tree for _, _, tree in parsed)):
        known.read(tree)
    functions = 0
    for file, source, tree in parsed:
        count, found = _lint(str(file), source, tree, known)
        functions += count
        findings += found
    return LintReport(len(files), functions, tuple(sorted(findings)))


def _files(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for file in sorted(path.rglob("*.py")):
            inside = file.relative_to(path).parts
            if not any(part.startswith(".") or part in _SKIPPED for part in inside):
                yield file
        return
    if not path.exists() or path.suffix != ".py":
        raise ConfigError(
            "nothing to lint there",
            asked=str(path),
            allowed="Python files and folders",
            hint="anyattn lint PACKAGE_FOLDER",
        )
    yield path


def _vocabulary() -> Iterator[ast.Module]:
    core = Path(__file__).resolve().parent.parent / "core"
    for name in _VOCABULARY:
        yield ast.parse((core / name).read_text(encoding="utf-8"))


def _lint(path: str, source: str, tree: ast.Module, known: Known) -> tuple[int, list[Finding]]:
    if "_in_graph" not in source and "anyattn:" not in source:
        return 0, []  # most files: nothing named, nothing marked
    comments = dict(_comments(source))
    scopes = graph_functions(tree, comments)
    allowed = _Allowed(path, source, comments)
    found = []
    for scope in scopes:
        for spot in check_function(scope, known):
            if not allowed.excuses(spot.node.lineno, spot.rule):
                column = spot.node.col_offset + 1
                message = f"{spot.what}: {RULES[spot.rule].text}"
                found.append(
                    _finding(path, spot.node.lineno, column, spot.rule, message, scope.name, scope.root)
                )
    return len(scopes), [*found, *allowed.complaints()]


def _finding(
    path: str, line: int, column: int, rule: str, message: str, function: str = "", root: str = ""
) -> Finding:
    found = RULES[rule]
    return Finding(path, line, column, found.code, rule, found.severity, message, function, root)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


class _Allowed:
    """Allow comments of one file, and which of them were needed."""

    def __init__(self, path: str, source: str, comments: dict[int, str]) -> None:
        self._path = path
        self._rules: dict[int, tuple[int, set[str]]] = {}  # line that is excused -> comment's line, rules
        self._bad: list[Finding] = []
        self._used: set[tuple[int, str]] = set()
        lines = source.splitlines()
        for line, text in comments.items():
            match = _ALLOW.match(text)
            if match:
                alone = lines[line - 1].lstrip().startswith("#")
                self._read(line, _next_code(lines, line) if alone else line, match)

    def _read(self, line: int, target: int, match: re.Match[str]) -> None:
        named = {name.strip() for name in (match[1] or "").split(",") if name.strip()}
        by_code = {rule.code: rule.name for rule in RULES.values()}
        rules = {by_code.get(name, name) for name in named}
        unknown = sorted(rules - set(RULES))
        if unknown or not rules:
            what = f"unknown rule {', '.join(unknown)}" if unknown else "no rule named"
            self._complain(line, f"{what}; rules: {', '.join(RULES)}")
        elif not match[2].strip():
            self._complain(line, "give a reason: `# anyattn: allow(rule) why this is right here`")
        else:
            self._rules[target] = (line, rules)

    def _complain(self, line: int, message: str) -> None:
        self._bad.append(_finding(self._path, line, 1, "bad-allow", message))

    def excuses(self, line: int, rule: str) -> bool:
        """Is this rule allowed on this line? Notes that the comment was needed."""
        comment, rules = self._rules.get(line, (0, set()))
        if rule in rules:
            self._used.add((comment, rule))
        return rule in rules

    def complaints(self) -> Iterable[Finding]:
        """Comments that can't be read, and those that excused nothing."""
        yield from self._bad
        for line, rules in self._rules.values():
            for rule in sorted(rules):
                if (line, rule) not in self._used:
                    yield _finding(self._path, line, 1, "unused-allow", f"{rule} isn't broken there")


def _next_code(lines: Sequence[str], line: int) -> int:
    """Number of the first line behind `line` that isn't blank or a comment."""
    for number in range(line, len(lines)):
        text = lines[number].strip()
        if text and not text.startswith("#"):
            return number + 1
    return line
