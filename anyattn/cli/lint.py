"""Lint the code that graphs record: functions named `*_in_graph`, functions marked `# anyattn: in-graph`, and
what they call in the same module. Works on any Python code, without torch and without importing it.

Exit code 1 if there are errors (with --strict: or warnings). A line is excused by a comment with a reason:
`# anyattn: allow(RULE) REASON`.
"""

from __future__ import annotations

import argparse
import json

from anyattn.errors import ConfigError
from anyattn.testing.lint import LintReport, lint_paths
from anyattn.testing.lint_rules import RULES

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `anyattn lint`."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="Python files and folders")
    parser.add_argument("--strict", action="store_true", help="warnings fail too")
    parser.add_argument("--quiet", action="store_true", help="print errors only, and the count of warnings")
    parser.add_argument("--rules", action="store_true", help="list the rules")


def run(args: argparse.Namespace) -> int:
    """Lint and report. Raises `ConfigError` for no path, or one that isn't there."""
    if args.rules:
        print(_rules(args.json))
        return 0
    if not args.paths:
        raise ConfigError(
            "lint needs something to read",
            asked="no path",
            allowed="Python files and folders",
            hint="anyattn lint PACKAGE_FOLDER",
        )
    report = lint_paths(args.paths)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        print(_text(report, quiet=args.quiet))
    return 1 if report.errors or (args.strict and report.warnings) else 0


def _text(report: LintReport, *, quiet: bool) -> str:
    shown = [str(f) for f in report.findings if not quiet or f.severity == "error"]
    return "\n".join(
        [
            *shown,
            f"{report.functions} functions in graphs, in {report.files} files: "
            f"{report.errors} errors, {report.warnings} warnings",
        ]
    )


def _rules(as_json: bool) -> str:
    if as_json:
        return json.dumps([vars(rule) for rule in RULES.values()], indent=2)
    return "\n".join(f"{r.code} {r.name:<14} {r.severity:<8} {r.text}" for r in RULES.values())
