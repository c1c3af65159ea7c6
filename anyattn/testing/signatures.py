"""Signatures of vendor libraries, read from their source without importing them, and kept as small files.

    python -m anyattn.testing.signatures FILE.json --from DISTRIBUTION.whl          says what differs
    python -m anyattn.testing.signatures FILE.json --from DISTRIBUTION.whl --write  records it

`--from` also takes an unpacked folder; without it the installed distribution is read. A file names its
targets (`module:Class.method`), so that it holds what adapters call and stand-ins imitate, and nothing else.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from anyattn.errors import AnyattnError, ConfigError

__all__ = ["Recorded", "SignatureError", "Source", "differences", "main", "signature_of", "signature_text"]

_MISSING = "not there"


class SignatureError(AnyattnError):
    """A name that a library's source doesn't define."""


@dataclass(frozen=True)
class Source:
    """Python files of one distribution: a wheel, an unpacked folder or what is installed."""

    distribution: str
    version: str
    read: Callable[[str], str | None]

    @staticmethod
    def of(place: Path) -> Source:
        """A wheel or the folder that holds its packages and `*.dist-info`.

        Raises:
            ConfigError: neither a wheel nor such a folder.
        """
        if place.suffix == ".whl" and place.is_file():
            archive = zipfile.ZipFile(place)
            names = set(archive.namelist())

            def read(path: str) -> str | None:
                return archive.read(path).decode() if path in names else None

            infos = [name for name in names if name.endswith(".dist-info/METADATA")]
        else:

            def read(path: str) -> str | None:
                file = place / path
                return file.read_text() if file.is_file() else None

            infos = [str(p.relative_to(place)) for p in place.glob("*.dist-info/METADATA")]
        if len(infos) != 1:
            raise ConfigError("source of signatures", asked=place, allowed="a wheel, or one unpacked")
        about = HeaderParser().parsestr(read(infos[0]) or "")
        return Source(str(about["Name"]), str(about["Version"]), read)

    @staticmethod
    def installed(distribution: str) -> Source:
        """What is installed under that name.

        Raises:
            importlib.metadata.PackageNotFoundError: nothing is.
        """
        found = metadata.distribution(distribution)

        def read(path: str) -> str | None:
            file = Path(str(found.locate_file(path)))
            return file.read_text() if file.is_file() else None

        return Source(distribution, found.version, read)

    def signature(self, target: str) -> str:
        """Text of `module:function` or `module:Class.method`; names that a module imports are followed.

        Raises:
            SignatureError: the source doesn't define it.
        """
        module, _, path = target.partition(":")
        node, tree = _found(self, module, path.split("."), target)
        return _text(node, _constants(tree))


def _found(
    source: Source, module: str, path: list[str], target: str
) -> tuple[ast.FunctionDef, ast.Module]:  # fmt: skip
    """The function behind a path (a class's `__init__`), and the module in which it stands."""
    package, tree = _parsed(source, module)
    if tree is None:
        raise SignatureError("module of a signature", asked=target, allowed="one that the source has")
    bodies: Sequence[ast.stmt] = tree.body
    for depth, name in enumerate(path):
        node = _defined(bodies, name)
        if isinstance(node, ast.FunctionDef) and depth == len(path) - 1:
            return node, tree
        if isinstance(node, ast.ClassDef):
            bodies = node.body
            continue
        for other, original in _imports(tree, module, package, name) if not depth else ():
            try:
                return _found(source, other, [original, *path[1:]], target)
            except SignatureError:
                continue
        break
    made = _defined(bodies, "__init__")
    if isinstance(made, ast.FunctionDef) and len(path) == 1 and bodies is not tree.body:
        return made, tree
    raise SignatureError("name of a signature", asked=target, allowed="one that the source defines")


def _constants(tree: ast.Module) -> dict[str, str]:
    """Names that a module sets to a literal: defaults may be spelled so."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            found.update({t.id: repr(node.value.value) for t in node.targets if isinstance(t, ast.Name)})
    return found


def _parsed(source: Source, module: str) -> tuple[bool, ast.Module | None]:
    """(is a package, its tree)."""
    base = module.replace(".", "/")
    for path, package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
        text = source.read(path)
        if text is not None:
            return package, ast.parse(text)
    return False, None


def _defined(body: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """The last definition of a name that isn't an `@overload`."""
    found: ast.stmt | None = None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            if not any(ast.unparse(d).endswith("overload") for d in node.decorator_list):
                found = node
        elif isinstance(node, ast.If | ast.Try):
            found = _defined(node.body, name) or found
    return found


def _imports(tree: ast.Module, module: str, package: bool, name: str) -> list[tuple[str, str]]:
    """(module, original name) of every import that may have brought `name` here, stars last."""
    named, stars = [], []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        home = node.module or ""
        if node.level:
            parts = module.split(".")
            base = parts[: len(parts) - node.level + (1 if package else 0)]
            home = ".".join([*base, *([home] if home else [])])
        for alias in node.names:
            if alias.name == "*":
                stars.append((home, name))
            elif (alias.asname or alias.name) == name:
                named.append((home, alias.name))
    return [*named, *stars]


def _text(node: ast.FunctionDef, constants: Mapping[str, str]) -> str:
    """Names, kinds and defaults; annotations and a leading self or cls left out."""

    def spelled(default: ast.expr) -> str:
        return constants.get(ast.unparse(default), ast.unparse(default))

    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + [spelled(d) for d in args.defaults]
    words = [(arg.arg, default) for arg, default in zip(plain, defaults, strict=True)]
    if words and words[0][0] in ("self", "cls"):
        words = words[1:]
    parts = [_word(name, default) for name, default in words]
    if args.vararg:
        parts.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        parts.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        parts.append(_word(arg.arg, None if default is None else spelled(default)))
    if args.kwarg:
        parts.append(f"**{args.kwarg.arg}")
    return f"({', '.join(parts)})"


def _word(name: str, default: str | None) -> str:
    return name if default is None else f"{name}={_plain(default)}"


def _plain(default: str) -> str:
    """One spelling for one value: `1e-3` is `0.001`."""
    try:
        return repr(ast.literal_eval(default))
    except ValueError:
        return default


def signature_text(function: Any) -> str:
    """The same text of a live function, method or class."""
    parts: list[str] = []
    star = False
    for name, p in inspect.signature(function).parameters.items():
        if not parts and name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        mark = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        default = None if p.default is p.empty else repr(p.default)
        parts.append(f"{mark}{name}" if mark else _word(name, default))
    return f"({', '.join(parts)})"


def signature_of(modules: Mapping[str, ModuleType], target: str) -> str:
    """The text of a target among live modules.

    Raises:
        SignatureError: a module or name that isn't there.
    """
    module, _, path = target.partition(":")
    found: Any = modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        raise SignatureError("name of a signature", asked=target, allowed="one that the modules have")
    return signature_text(found)


@dataclass(frozen=True)
class Recorded:
    """A file of recorded signatures: whose, of which version, imitated by which emulators."""

    distribution: str
    version: str
    emulators: tuple[str, ...]
    signatures: Mapping[str, str]

    @staticmethod
    def load(file: Path) -> Recorded:
        """Read a file that `save` wrote."""
        data = json.loads(file.read_text())
        names = tuple(data["emulators"])
        return Recorded(data["distribution"], data["version"], names, data["signatures"])

    def save(self, file: Path) -> None:
        """Write it, sorted, one signature a line."""
        data = {
            "distribution": self.distribution,
            "version": self.version,
            "emulators": list(self.emulators),
            "signatures": dict(sorted(self.signatures.items())),
        }
        file.write_text(json.dumps(data, indent=1) + "\n")

    def read_from(self, source: Source) -> Recorded:
        """The same targets as another source defines them; what it lacks is said so."""
        found = {}
        for target in self.signatures:
            try:
                found[target] = source.signature(target)
            except SignatureError:
                found[target] = _MISSING
        return Recorded(source.distribution, source.version, self.emulators, found)


def differences(a: Recorded, b: Recorded) -> list[str]:
    """A line for each target on which two records disagree."""
    targets = sorted({*a.signatures, *b.signatures})
    pairs = ((t, a.signatures.get(t, _MISSING), b.signatures.get(t, _MISSING)) for t in targets)
    return [f"{target}\n  {x}\n  {y}" for target, x, y in pairs if x != y]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit status 1 if something differs and isn't written."""
    parser = argparse.ArgumentParser(description="recorded signatures against a library's source")
    parser.add_argument("file", type=Path)
    parser.add_argument("--from", dest="source", type=Path, metavar="WHEEL_OR_FOLDER")
    parser.add_argument(
        "--add", nargs="*", default=[], metavar="MODULE:NAME", help="targets to record as well"
    )
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    old = Recorded.load(args.file)
    source = Source.of(args.source) if args.source else Source.installed(old.distribution)
    wanted = {**old.signatures, **dict.fromkeys(args.add, _MISSING)}
    new = Recorded(old.distribution, old.version, old.emulators, wanted).read_from(source)
    found = differences(old, new)
    print("\n".join([*found, f"{new.distribution} {new.version}: {len(found)} of {len(wanted)} differ"]))
    if args.write:
        new.save(args.file)
    return 1 if found and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
