"""A mutant: one piece of real source replaced at run time, and put back afterwards.

The function is compiled again from its own source with the change in it; the files on disk stay as they
are. Triton kernels are decorated again too, which the interpreter takes.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import itertools
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from anyattn.errors import AnyattnError

__all__ = ["Mutant", "MutantError", "applied"]


class MutantError(AnyattnError):
    """A mutant that no longer fits the code that it breaks."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A deliberate fault.

    Attributes:
        name: of the fault, in words. where: `module:function` or `module:Class.method`.
        old, new: source text and what takes its place; `old` stands exactly once in the function.
        names: words, one of which must stand in the failure that catches it: so it names the fault.
        report: the public thread, `repository#number`, in which this fault was found.
        host: a chip on whose stand-in the broken code runs, where the hunt's own doesn't take that path.
    """

    name: str
    where: str
    old: str
    new: str
    names: tuple[str, ...]
    report: str = ""
    host: str = ""


_serials = itertools.count()


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The code with the fault in it, inside the block.

    Raises:
        MutantError: the function isn't there, or its source doesn't hold `old` exactly once.
    """
    module_name, _, path = mutant.where.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part, None)
    original = None if owner is None else vars(owner).get(name)
    if original is None:
        raise MutantError(
            f"mutant {mutant.name!r} breaks a function that isn't there",
            asked=mutant.where,
            hint="the code moved: give the mutant its new place, or drop it with a reason",
        )
    changed = _changed(mutant, original, module, owner if owners else None)
    if isinstance(changed, cached_property):
        changed.__set_name__(owner, name)
    places = [(owner, name)] if owners else list(_holders(original))
    for holder, attribute in places:
        setattr(holder, attribute, changed)
    try:
        yield
    finally:
        # Modules that were imported inside the block hold the fault as well.
        for holder, attribute in {*places, *_holders(changed)}:
            setattr(holder, attribute, original)


def _holders(original: object) -> Iterator[tuple[Any, str]]:
    """Every loaded module of the package that has the function under some name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "anyattn":
            for attribute, value in list(vars(module).items()):
                if value is original:
                    yield module, attribute


def _changed(mutant: Mutant, original: Any, module: Any, owner: type | None) -> Any:
    inner = original.func if isinstance(original, cached_property) else original
    plain: Callable[..., Any] = inspect.unwrap(getattr(inner, "fn", getattr(inner, "__func__", inner)))
    source = textwrap.dedent(inspect.getsource(plain))
    count = source.count(mutant.old)
    if count != 1:
        raise MutantError(
            f"mutant {mutant.name!r} no longer fits {mutant.where}",
            asked=f"the text {mutant.old!r} once",
            allowed=f"it stands there {count} times",
            hint="the code changed: change the mutant with it, so that it still breaks the same promise",
        )
    source = source.replace(mutant.old, mutant.new)
    if owner is not None:  # `super()` finds its class in the enclosing scope
        source = f"def method(__class__):\n{textwrap.indent(source, '    ')}    return {plain.__name__}\n"
    filename = f"<mutant {next(_serials)}: {mutant.name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    code = compile(source, filename, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    found: dict[str, Any] = {}
    exec(code, module.__dict__, found)
    return found[plain.__name__] if owner is None else found["method"](owner)
