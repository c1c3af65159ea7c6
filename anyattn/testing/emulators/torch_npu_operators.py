"""Calls of torch-npu's operators: arguments bound by schema, one step each for a graph that is captured.

As with real operators, an argument of another type is a `RuntimeError` before anything runs: lengths are
lists of host ints, never tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from anyattn.core.graph.host_arguments import HostArguments, last_noted
from anyattn.core.graph.recorder import record_call
from anyattn.testing.emulators.torch_npu_schemas import SCHEMAS, UPDATED

__all__ = ["Capture", "Operator", "Overload", "Record", "capturing", "schema_of"]

Tensor = torch.Tensor
Kernel = Callable[[Mapping[str, Any]], Sequence[Tensor]]
"""All arguments by name -> values of the outputs; what it writes in place it writes itself."""


@dataclass(eq=False)
class Record:
    """A recorded call whose host lists an update may replace: `_GraphDispatchRecord`.

    `names`: of its arguments; `fresh`: what has been replaced.
    """

    name: str
    names: frozenset[str]
    fresh: dict[str, Any] = field(default_factory=dict)


class Capture(Protocol):
    """A stand-in's graph while it is captured."""

    records: list[Record]

    @property
    def dispatching(self) -> bool:
        """Are calls with host lists recorded so that they can be updated?"""

    def call(self, fn: Callable[..., None], tensors: Sequence[Tensor], name: str) -> None:
        """As `Recording.call`."""


capturing: ContextVar[Capture | None] = ContextVar("anyattn_npu_capture", default=None)
"""The NPU graph that is being captured."""


def schema_of(name: str) -> Any:
    """torch's own parse of an operator's schema."""
    return torch._C.parse_schema(f"npu::{SCHEMAS[name]}")


def _fits(kind: str, value: Any) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(kind[len("Optional[") : -1], value)
    if kind == "Tensor":
        return isinstance(value, torch.Tensor)
    if kind == "List[int]":
        return isinstance(value, (list, tuple)) and all(_fits("int", x) for x in value)
    if kind == "int":
        return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, {"bool": bool, "str": str}[kind])


def _bound(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    places = [a for a in schema.arguments if not a.kwarg_only]
    if len(args) > len(places):
        raise RuntimeError(f"{schema.name}() expected at most {len(places)} positional arguments")
    given = {a.name: x for a, x in zip(places, args, strict=False)}
    for name, value in kwargs.items():
        if name in given or name not in {a.name for a in schema.arguments}:
            raise RuntimeError(f"Unknown keyword argument '{name}' for operator '{schema.name}'")
        given[name] = value
    for argument in schema.arguments:
        if argument.name not in given and not argument.has_default_value():
            raise RuntimeError(f"{schema.name}() is missing value for argument '{argument.name}'")
        value = given.setdefault(
            argument.name, argument.default_value if argument.has_default_value() else None
        )
        if not _fits(str(argument.type), value):
            raise RuntimeError(
                f"{schema.name}() Expected a value of type '{argument.type}' for argument "
                f"'{argument.name}' but instead found type '{type(value).__name__}'"
            )
    return {a.name: given[a.name] for a in schema.arguments}


@dataclass(frozen=True, eq=False)
class _Call:
    """One call: its kernel, names of its tensors, everything else, and where lists come from at a replay."""

    kernel: Kernel
    tensors: tuple[str, ...]
    outputs: int
    host: Mapping[str, Any]
    record: Record | None
    source: HostArguments | None
    updated: tuple[str, ...]

    def __call__(self, *tensors: Tensor) -> None:
        outs, given = tensors[: self.outputs], tensors[self.outputs :]
        fresh = self.record.fresh if self.record is not None else self.source() if self.source else {}
        known = {name: fresh[name] for name in self.updated if name in fresh}
        values = self.kernel({**self.host, **dict(zip(self.tensors, given, strict=True)), **known})
        for out, value in zip(outs, values, strict=True):
            out.copy_(value)


class Overload:
    """What the library calls an overload: `torch_npu.NAME.default`, `torch_npu.NAME.out`."""

    def __init__(self, operator: Operator, out: bool) -> None:
        self._operator, self._out = operator, out
        self._schema = operator._schema
        self.__name__ = f"{operator.__name__}.{'out' if out else 'default'}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`out` overloads take `out=[...]` and `workspace=` besides."""
        if not self._out:
            return self._operator._run(args, kwargs, None)
        outs = kwargs.pop("out")
        kwargs.pop("workspace", None)
        return self._operator._run(args, kwargs, list(outs))


class Operator:
    """`torch_npu.NAME`: a packet that calls its default overload.

    Args:
        infer: shapes of the outputs; None for operators that write into an argument and return nothing.
    """

    def __init__(
        self, name: str, kernel: Kernel, infer: Callable[[Mapping[str, Any]], Sequence[Tensor]] | None = None
    ) -> None:
        self.__name__ = name
        self._schema = schema_of(name)
        self._kernel, self._infer = kernel, infer
        self.default = Overload(self, out=False)
        if infer is not None:
            self.out = Overload(self, out=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the default overload."""
        return self.default(*args, **kwargs)

    def _run(self, args: Sequence[Any], kwargs: Mapping[str, Any], outs: list[Tensor] | None) -> Any:
        bound = _bound(self._schema, args, kwargs)
        made = list(self._infer(bound)) if self._infer is not None else []
        if outs is not None:
            if [tuple(o.shape) for o in outs[:1]] != [tuple(m.shape) for m in made[:1]]:
                raise RuntimeError(f"{self.__name__}: attention_out has another shape than is computed")
            made = outs
        capture, source = capturing.get(), last_noted()
        record = None
        updated = UPDATED.get(self.__name__, ())
        if capture is not None and capture.dispatching and updated:
            record = Record(self.__name__, frozenset(bound))
            capture.records.append(record)
        names = tuple(n for n, value in bound.items() if isinstance(value, torch.Tensor))
        host = {n: deepcopy(value) for n, value in bound.items() if n not in names}
        call = _Call(
            self._kernel, names, len(made), host, record, source if capture is None else None, updated
        )
        start = record_call if capture is None else capture.call
        start(call, [*made, *(bound[n] for n in names)], f"torch_npu.{self.__name__}")
        if self._infer is None:
            return None
        return made[0] if len(made) == 1 else tuple(made)
