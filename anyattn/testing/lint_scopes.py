"""Which functions of a module run inside a graph: those named `*_in_graph`, marked ones, and what they call.

A mark is a comment on the line of the `def`: `# anyattn: in-graph`. Calls are followed inside the module: to
functions by name, and to methods through `self`, `cls`, `super()` or the class.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Scope", "graph_functions"]

Function = ast.FunctionDef | ast.AsyncFunctionDef
_MARK = re.compile(r"#\s*anyattn:\s*in-graph\b")
_SUFFIX = "_in_graph"


@dataclass(frozen=True, eq=False)
class Scope:
    """A function that runs inside a graph, and the one that brought it there (itself for a root)."""

    function: Function
    name: str
    root: str


def graph_functions(tree: ast.Module, comments: Mapping[int, str]) -> list[Scope]:
    """In the order of the file. `comments`: by line."""
    index = _Index(tree)
    found: dict[str, Scope] = {}
    for name, function in index.functions.items():
        lines = range(function.lineno, function.body[0].lineno + 1)
        marked = any(_MARK.search(comments.get(line, "")) for line in lines)
        if function.name.endswith(_SUFFIX) or marked:
            found[name] = Scope(function, name, name)
    open_ = list(found.values())
    while open_:
        scope = open_.pop()
        for called in index.calls(scope):
            if called not in found:
                found[called] = Scope(index.functions[called], called, scope.root)
                open_.append(found[called])
    return sorted(found.values(), key=lambda s: s.function.lineno)


class _Index:
    """Functions of a module by name (`f`, `Class.f`), and the classes' bases."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions: dict[str, Function] = {}
        self._bases: dict[str, list[str]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._bases[node.name] = [ast.unparse(base) for base in node.bases]
                for item in node.body:
                    if isinstance(item, Function):
                        self.functions[f"{node.name}.{item.name}"] = item
        for item in tree.body:
            if isinstance(item, Function):
                self.functions[item.name] = item

    def calls(self, scope: Scope) -> Iterator[str]:
        """Names of this module's functions that a function calls."""
        owner = scope.name.rpartition(".")[0]
        for node in ast.walk(scope.function):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name) and node.func.id in self.functions:
                yield node.func.id
            elif isinstance(node.func, ast.Attribute):
                base = ast.unparse(node.func.value)
                start = owner if base in ("self", "cls", "super()") else base
                method = self._method(start, node.func.attr, above=base == "super()")
                if method is not None:
                    yield method

    def _method(self, owner: str, name: str, *, above: bool = False) -> str | None:
        """The method that `owner` has, or inherits from a class of this module."""
        if not above and f"{owner}.{name}" in self.functions:
            return f"{owner}.{name}"
        inherited = (self._method(base, name) for base in self._bases.get(owner, ()) if base != owner)
        return next((method for method in inherited if method is not None), None)
