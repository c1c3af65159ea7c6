"""Which expressions of a function are tensors, from names, annotations and torch's own API. No torch needed.

A guess, made to be right where it says TENSOR: what it doesn't know is OTHER and raises no finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["ANY_TENSOR", "Kind", "Known", "Locals", "called_name", "kind_of_annotation"]


class Kind(Enum):
    """MASK: a boolean tensor. GROUP: several tensors (tuple, list, mapping). OTHER: anything else."""

    TENSOR = "tensor"
    MASK = "mask"
    GROUP = "group"
    OTHER = "other"


ANY_TENSOR = (Kind.TENSOR, Kind.MASK)

_TORCH = ("torch", "F", "torch.nn.functional")
_PLAIN_FUNCTIONS = frozenset(
    ("is_tensor", "device", "Size", "finfo", "iinfo", "no_grad", "inference_mode", "compile", "numel",
     "is_floating_point", "is_complex", "get_default_dtype", "promote_types", "result_type", "Generator",
     "equal", "allclose", "is_nonzero", "is_grad_enabled", "is_inference_mode_enabled", "typename")
)  # fmt: skip
_PLAIN_MEMBERS = frozenset(
    ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "itemsize", "nbytes", "requires_grad", "size",
     "stride", "numel", "dim", "ndimension", "nelement", "data_ptr", "element_size", "is_contiguous",
     "storage_offset", "untyped_storage", "get_device", "type", "is_floating_point", "is_complex", "item",
     "tolist", "numpy", "equal", "allclose", "is_nonzero", "is_pinned")
)  # fmt: skip
_GROUPS = frozenset(
    ("split", "chunk", "unbind", "tensor_split", "meshgrid", "topk", "sort", "split_with_sizes", "unique",
     "broadcast_tensors", "aminmax", "cummax", "cummin", "kthvalue", "mode")
)  # fmt: skip
_MASKS = frozenset(
    ("bool", "isnan", "isinf", "isfinite", "isneginf", "isposinf", "logical_and", "logical_or", "logical_not",
     "logical_xor", "eq", "ne", "lt", "le", "gt", "ge", "isin", "isclose")
)  # fmt: skip


def kind_of_annotation(node: ast.expr | None) -> Kind:
    """TENSOR for `Tensor` and `Tensor | None`, GROUP for containers of tensors."""
    text = "" if node is None else ast.unparse(node).strip("'\"")
    if "Tensor" not in text or text.startswith(("Callable", "type[")):
        return Kind.OTHER
    parts = {re.sub(r"^Optional\[(.*)\]$", r"\1", p.strip()) for p in text.split("|")} - {"None"}
    return Kind.TENSOR if parts <= {"torch.Tensor", "Tensor"} else Kind.GROUP


def called_name(call: ast.Call) -> tuple[str | None, str]:
    """`(receiver, name)` of a call: `("torch", "where")`, `("x.t()", "item")`, `(None, "int")`."""
    if isinstance(call.func, ast.Attribute):
        return ast.unparse(call.func.value), call.func.attr
    return None, call.func.id if isinstance(call.func, ast.Name) else ""


def is_torch(receiver: str | None) -> bool:
    """`torch.` and `torch.nn.functional.` as they are usually imported."""
    return receiver in _TORCH


@dataclass
class Known:
    """What annotations say: kinds of attributes, and of what functions and methods return, by name."""

    attributes: dict[str, Kind] = field(default_factory=dict)
    returns: dict[str, Kind] = field(default_factory=dict)

    def read(self, tree: ast.AST) -> None:
        """Add what a module's annotations say. A name with two meanings is OTHER."""
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                        _note(self.attributes, item.target.id, kind_of_annotation(item.annotation))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                _note(self.attributes, node.target.attr, kind_of_annotation(node.annotation))
            elif isinstance(node, ast.FunctionDef):
                kind = kind_of_annotation(node.returns)
                is_property = any(ast.unparse(d) == "property" for d in node.decorator_list)
                _note(self.attributes if is_property else self.returns, node.name, kind)


def _note(table: dict[str, Kind], name: str, kind: Kind) -> None:
    table[name] = kind if table.get(name, kind) is kind else Kind.OTHER


class Locals:
    """Kinds of a function's names, as its statements bind them in order."""

    def __init__(self, known: Known, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        self._known = known
        self._names: dict[str, Kind] = {}
        self.enter(function)

    def enter(self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        """Bind the parameters."""
        spec = function.args
        for arg in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs):
            self._names[arg.arg] = kind_of_annotation(arg.annotation)
        for star in (spec.vararg, spec.kwarg):
            if star is not None and kind_of_annotation(star.annotation) is not Kind.OTHER:
                self._names[star.arg] = Kind.GROUP

    def bind(self, target: ast.expr, kind: Kind, value: ast.expr | None = None) -> None:
        """An assignment: names of a tuple take the kinds of its parts, or are the members of a GROUP."""
        if isinstance(target, ast.Name):
            self._names[target.id] = kind
        elif isinstance(target, ast.Starred):
            self.bind(target.value, kind)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            for i, part in enumerate(target.elts):
                member = Kind.TENSOR if kind in (Kind.GROUP, *ANY_TENSOR) else Kind.OTHER
                self.bind(part, self.kind(parts[i]) if len(parts) == len(target.elts) else member)

    def kind(self, node: ast.expr) -> Kind:
        """Of an expression."""
        match node:
            case ast.Name():
                return self._names.get(node.id, Kind.OTHER)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Call():
                return self._call(node)
            case ast.BinOp():
                return self._mixed(node.left, node.right)
            case ast.UnaryOp():
                return Kind.OTHER if isinstance(node.op, ast.Not) else self.kind(node.operand)
            case ast.Compare():
                plain = all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
                tensor = any(self.kind(x) in ANY_TENSOR for x in (node.left, *node.comparators))
                return Kind.MASK if tensor and not plain else Kind.OTHER
            case ast.IfExp():
                return self._mixed(node.body, node.orelse)
            case ast.Subscript():
                return self._subscript(node)
            case ast.NamedExpr() | ast.Starred():
                return self.kind(node.value)
            case ast.Tuple() | ast.List():
                return Kind.GROUP if any(self.kind(x) in ANY_TENSOR for x in node.elts) else Kind.OTHER
        return Kind.OTHER

    def _mixed(self, *nodes: ast.expr) -> Kind:
        kinds = [self.kind(node) for node in nodes]
        if all(kind is Kind.MASK for kind in kinds):
            return Kind.MASK
        return Kind.TENSOR if any(kind in ANY_TENSOR for kind in kinds) else Kind.OTHER

    def _attribute(self, node: ast.Attribute) -> Kind:
        if node.attr in _PLAIN_MEMBERS or ast.unparse(node.value) == "torch":
            return Kind.OTHER
        base = self.kind(node.value)
        return base if base in ANY_TENSOR else self._known.attributes.get(node.attr, Kind.OTHER)

    def _subscript(self, node: ast.Subscript) -> Kind:
        base = self.kind(node.value)
        if base is Kind.GROUP:
            return Kind.GROUP if isinstance(node.slice, ast.Slice) else Kind.TENSOR
        return base

    def _call(self, node: ast.Call) -> Kind:
        receiver, name = called_name(node)
        if is_torch(receiver):
            return Kind.OTHER if name in _PLAIN_FUNCTIONS or name[:1].isupper() else _result(name)
        if isinstance(node.func, ast.Attribute):
            base = self.kind(node.func.value)
            if base in ANY_TENSOR:
                return Kind.OTHER if name in _PLAIN_MEMBERS else _result(name)
            if base is Kind.GROUP:
                return {"get": Kind.TENSOR, "pop": Kind.TENSOR, "values": Kind.GROUP}.get(name, Kind.OTHER)
        ours = receiver in (None, "self", "cls")  # elsewhere the name may be anybody's
        return self._known.returns.get(name, Kind.OTHER) if ours else Kind.OTHER


def _result(name: str) -> Kind:
    table: Mapping[bool, Kind] = {name in _GROUPS: Kind.GROUP, name in _MASKS: Kind.MASK}
    return table.get(True, Kind.TENSOR)
