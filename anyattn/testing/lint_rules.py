"""The rules of `anyattn lint`: what code inside a graph may not do, seen in its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from anyattn.testing.lint_scopes import Scope
from anyattn.testing.lint_tensors import ANY_TENSOR, Kind, Known, Locals, called_name, is_torch

__all__ = ["RULES", "Rule", "Spot", "check_function"]


@dataclass(frozen=True)
class Rule:
    """`severity`: `error` breaks a capture or freezes a value; `warning` breaks the contract."""

    code: str
    name: str
    severity: str
    text: str


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("AG000", "unreadable", "error", "the file is no Python"),
        Rule("AG001", "host-sync", "error", "the host waits for the device, or reads a value of it"),
        Rule("AG002", "tensor-branch", "error", "Python decides by a value on the device"),
        Rule("AG003", "dynamic-shape", "error", "a result's shape depends on values on the device"),
        Rule("AG004", "allocation", "warning", "allocates: write into planned buffers (out=)"),
        Rule("AG005", "bad-allow", "error", "an allow comment without a reason, or with an unknown rule"),
        Rule("AG006", "unused-allow", "warning", "an allow comment that allows nothing"),
    )
}
"""By name. Python, branches and shapes are frozen at capture: what reads the device must stand outside."""

_READS = frozenset(("item", "tolist", "cpu", "numpy", "equal", "allclose", "is_nonzero", "synchronize"))
_HOST_DATA = frozenset(("tensor", "as_tensor", "from_numpy", "new_tensor", "pin_memory"))
_CONVERSIONS = frozenset(
    ("bool", "int", "float", "complex", "range", "print", "str", "repr", "any", "all", "min", "max", "sorted")
)
_DYNAMIC = frozenset(("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"))
_FACTORIES = frozenset(
    ("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn", "randint", "randperm",
     "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "empty_strided", "cat",
     "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "tile", "repeat_interleave", "clone")
)  # fmt: skip
_COPIES = frozenset(
    ("clone", "to", "contiguous", "repeat", "repeat_interleave", "new_empty", "new_zeros", "new_ones",
     "new_full", "new_empty_strided")
)  # fmt: skip
_CASTS = frozenset(("float", "half", "bfloat16", "double", "long", "int", "short", "bool", "type"))


@dataclass(frozen=True)
class Spot:
    """A rule broken at a node."""

    rule: str
    node: ast.expr | ast.stmt
    what: str


def check_function(scope: Scope, known: Known) -> list[Spot]:
    """All that a function breaks, in source order."""
    spots = _Visitor(known, scope).spots
    return sorted(spots, key=lambda s: (s.node.lineno, s.node.col_offset))


_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp


class _Visitor(ast.NodeVisitor):
    """Walks in order of execution, so that names have the kinds that they were last given."""

    def __init__(self, known: Known, scope: Scope) -> None:
        self.spots: list[Spot] = []
        self._locals = Locals(known, scope.function)
        for statement in scope.function.body:
            self.visit(statement)

    def _add(self, rule: str, node: ast.expr | ast.stmt, what: str) -> None:
        self.spots.append(Spot(rule, node, what))

    def _is_tensor(self, node: ast.expr) -> bool:
        return self._locals.kind(node) in ANY_TENSOR

    # -- bindings ------------------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        """Value first, then stores through masks, then names."""
        self.visit(node.value)
        for target in node.targets:
            self._store(target, node.value)
            self._locals.bind(target, self._locals.kind(node.value), node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """As an assignment."""
        if node.value is not None:
            self.visit(node.value)
            self._store(node.target, node.value)
            self._locals.bind(node.target, self._locals.kind(node.value), node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """`x[mask] += y` reads through the mask."""
        self.visit(node.value)
        if isinstance(node.target, ast.Subscript):
            self._boolean_index(node.target)
        self.generic_visit(node.target)

    def visit_For(self, node: ast.For) -> None:
        """The target of a loop over tensors is a tensor."""
        self.visit(node.iter)
        member = Kind.TENSOR if self._locals.kind(node.iter) is not Kind.OTHER else Kind.OTHER
        self._locals.bind(node.target, member)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function inside the function."""
        self._locals.enter(node)
        for statement in node.body:
            self.visit(statement)

    def _store(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Subscript):
            if self._locals.kind(target.slice) is Kind.MASK and self._is_tensor(value):
                self._add("dynamic-shape", target, "a store of a tensor through a boolean mask")
            if self._is_tensor(target.value) and _is_number(target.slice) and _is_number(value):
                self._add("host-sync", target, "a number stored to one element is a copy; fill a slice")
            self.visit(target.value)
            self.visit(target.slice)

    # -- branches ------------------------------------------------------------------------------------

    def _test(self, node: ast.expr, what: str) -> None:
        if self._is_tensor(node):
            self._add("tensor-branch", node, f"{what} `{ast.unparse(node)}`")

    def visit_If(self, node: ast.If) -> None:
        """`if tensor:`."""
        self._test(node.test, "if")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        """`while tensor:`."""
        self._test(node.test, "while")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """`a if tensor else b`."""
        self._test(node.test, "if")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """`assert tensor`."""
        self._test(node.test, "assert")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`tensor and x`: every operand but the last is tested."""
        for value in node.values[:-1]:
            self._test(value, "and" if isinstance(node.op, ast.And) else "or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """`not tensor`."""
        if isinstance(node.op, ast.Not):
            self._test(node.operand, "not")
        self.generic_visit(node)

    def _comprehension(self, node: _Comprehension) -> None:
        for part in node.generators:
            self.visit(part)
        for made in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(made)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """`[... for x in tensors if x]`."""
        member = Kind.TENSOR if self._locals.kind(node.iter) is not Kind.OTHER else Kind.OTHER
        self._locals.bind(node.target, member)
        for test in node.ifs:
            self._test(test, "if")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """`x in tensor` looks for it on the host."""
        for op, right in zip(node.ops, node.comparators, strict=True):
            if isinstance(op, (ast.In, ast.NotIn)) and self._is_tensor(right):
                self._add("host-sync", node, f"`in {ast.unparse(right)}`")
        self.generic_visit(node)

    # -- reads, shapes, memory -----------------------------------------------------------------------

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        """`f"{tensor}"`."""
        if self._is_tensor(node.value):
            self._add("host-sync", node.value, f"`{ast.unparse(node.value)}` in a string")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Boolean indices, and tensors as bounds of a slice."""
        if isinstance(node.ctx, ast.Load):
            self._boolean_index(node)
        self.generic_visit(node)

    def _boolean_index(self, node: ast.Subscript) -> None:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if any(self._locals.kind(part) is Kind.MASK for part in parts):
            self._add("dynamic-shape", node, f"boolean index `[{ast.unparse(node.slice)}]`")

    def visit_Slice(self, node: ast.Slice) -> None:
        """`x[:tensor]`."""
        for bound in (node.lower, node.upper, node.step):
            if bound is not None and self._is_tensor(bound):
                self._add("host-sync", bound, f"`{ast.unparse(bound)}` as the bound of a slice")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """The rules of calls; the first that speaks is the one reported."""
        for rule in (_sync_of_call, _shape_of_call, _memory_of_call):
            found = rule(node, self._is_tensor)
            if found is not None:
                self._add(*found)
                break
        self.generic_visit(node)


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and type(node.value) in (int, float, bool)


_Found = tuple[str, ast.expr, str] | None
_IsTensor = Callable[[ast.expr], bool]


def _sync_of_call(node: ast.Call, is_tensor: _IsTensor) -> _Found:
    receiver, name = called_name(node)
    if receiver is None:
        if name in _CONVERSIONS and any(is_tensor(arg) for arg in node.args):
            return "host-sync", node, f"{name}() of a tensor"
        return None
    if name in _READS:
        return "host-sync", node, f"{_shown(receiver, name)}() reads on the host"
    if name in _HOST_DATA and (is_torch(receiver) or name in ("new_tensor", "pin_memory")):
        given = node.args[0] if node.args else None
        if name != "as_tensor" or given is None or not is_tensor(given):
            return "host-sync", node, f"{_shown(receiver, name)}() copies from the host, and waits"
    if receiver in ("np", "numpy") and any(is_tensor(arg) for arg in node.args):
        return "host-sync", node, f"{receiver}.{name}() of a tensor"
    if name == "to" and any("'cpu'" in ast.unparse(arg) for arg in _arguments(node)):
        return "host-sync", node, ".to('cpu') reads on the host"
    return None


def _shape_of_call(node: ast.Call, is_tensor: _IsTensor) -> _Found:
    receiver, name = called_name(node)
    if receiver is None:
        return None
    keywords = {k.arg for k in node.keywords}
    operands = node.args[1:] if is_torch(receiver) else node.args
    dynamic = (
        name in _DYNAMIC
        or (name == "where" and is_torch(receiver) and len(node.args) + len(keywords) == 1)
        or (name == "repeat_interleave" and "output_size" not in keywords and any(map(is_tensor, operands)))
        or (name == "tensor_split" and any(map(is_tensor, operands)))
        or (name == "one_hot" and not operands and "num_classes" not in keywords)
    )
    return ("dynamic-shape", node, f"{_shown(receiver, name)}()") if dynamic else None


def _memory_of_call(node: ast.Call, is_tensor: _IsTensor) -> _Found:
    receiver, name = called_name(node)
    if receiver is None or any(k.arg == "out" for k in node.keywords):
        return None
    made = name in _FACTORIES if is_torch(receiver) else name in _COPIES
    if not made and isinstance(node.func, ast.Attribute):
        made = name in _CASTS and is_tensor(node.func.value)
    return ("allocation", node, f"{_shown(receiver, name)}()") if made else None


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args
    yield from (k.value for k in node.keywords)


def _shown(receiver: str, name: str) -> str:
    return f"{receiver}.{name}" if is_torch(receiver) else f".{name}"
