"""What a recording consists of, and the modes that write it: one step for each operation that does work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from anyattn.core.graph.recorder_memory import Memory, Ref, build, spoil
from anyattn.core.graph.recorder_rules import Where, here, refusal, refused_call, refused_op
from anyattn.errors import GraphError

__all__ = ["CallMode", "OpMode", "Recording", "Step", "compiling_nothing", "run_steps", "written_in_python"]

_UNWRITTEN = frozenset(
    ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


@dataclass(frozen=True, eq=False)
class Step:
    """One operation on frozen addresses. `results`: place in the flat output -> where it goes.

    `unwritten`: it only allocates, so a replay has nothing to compute.
    """

    name: str
    where: Where
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[tuple[int, Ref], ...] = ()
    unwritten: bool = False


class Recording:
    """Steps and memory of one capture. `paused`: torch runs unseen, inside an opaque call."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.steps: list[Step] = []
        self.paused = False
        self.broken: Callable[[], GraphError] | None = None  # an error kept would hold its callers in a cycle

    def refuse(self, operation: str, why: str) -> GraphError:
        """An error to raise; a body that swallows it still has no graph."""
        self.broken = partial(refusal, operation, why, here())
        return self.broken()

    def add(self, step: Step) -> None:
        """Append, and note the last use of each storage."""
        for ref in (*_refs((step.args, dict(step.kwargs))), *(r for _, r in step.results)):
            self.memory.tracked[ref.storage].last_use = len(self.steps)
        self.steps.append(step)

    def call(self, fn: Callable[..., None], tensors: Sequence[torch.Tensor], name: str) -> None:
        """Record `fn(*tensors)` as one step, and run it."""
        where = here()
        refs = tuple(self.memory.ref(t, name, where) for t in tensors)
        before, self.paused = self.paused, True
        try:
            fn(*tensors)
        finally:
            self.paused = before
        self.add(Step(name, where, fn, refs, {}))

    def operation(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Record one operation that a kernel serves, and run it."""
        name = str(func)
        why = refused_op(func, args, kwargs, self.memory.is_constant)
        if why is not None:
            raise self.refuse(name, why)
        where, memory = here(), self.memory
        if name.startswith("aten.lift_fresh"):
            if args[0].dim():
                raise self.refuse(name, "it copies Python values to the device, and waits")
            memory.keep_constant(args[0], where)
            return func(*args, **kwargs)
        frozen = _map((tuple(args), dict(kwargs)), torch.Tensor, lambda t: memory.ref(t, name, where))
        out = func(*args, **kwargs)
        results, fresh = [], set()
        for place, tensor in enumerate(_flat(out)):
            if isinstance(tensor, torch.Tensor):
                number = len(memory.tracked)
                ref = memory.ref(tensor, name, where, inside=True)
                if ref.storage >= number or ref.storage in fresh:
                    results.append((place, ref))
                    fresh.add(ref.storage)
        if results or func._schema.is_mutable or out is None:
            unwritten = func.overloadpacket.__name__ in _UNWRITTEN
            self.add(Step(name, where, func, frozen[0], frozen[1], tuple(results), unwritten))
        return out

    def born(self) -> list[int]:
        """Which step made each storage (0 for those from outside)."""
        made = [0] * len(self.memory.tracked)
        for index, step in enumerate(self.steps):
            for _, ref in step.results:
                made[ref.storage] = index
        return made


class CallMode(TorchFunctionMode):
    """Refuses what never reaches a kernel on a CPU."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch."""
        given = kwargs or {}
        if not self._recording.paused:
            why = refused_call(func, args, given)
            if why is not None:
                raise self._recording.refuse(getattr(func, "__name__", str(func)), why)
        return func(*args, **given)


class OpMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operation that reaches a kernel."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch."""
        given = kwargs or {}
        if self._recording.paused:
            return func(*args, **given)
        python = written_in_python(func)
        if python is not None:
            with self:  # its operations are recorded instead: no Python runs at replay
                return python(*args, **given)
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise self._recording.refuse(str(func), "an operator without a plain implementation")
        return self._recording.operation(func, args, given)


def compiling_nothing() -> AbstractContextManager[None]:
    """Compiled functions run as they were written: their kernels are started where no mode sees them.

    Only where something may be compiled: importing the compiler takes seconds.
    """
    loaded = {"torch._dynamo", "torch.nn.attention.flex_attention"} & set(sys.modules)
    context: AbstractContextManager[None] = (
        torch.compiler.set_stance("force_eager") if loaded else nullcontext()
    )
    return context


def written_in_python(func: Any) -> Callable[..., Any] | None:
    """The body of a higher-order operator, or of an op made by `torch.library.custom_op`."""
    if isinstance(func, torch._ops.HigherOrderOperator):
        return func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    if func.namespace in ("aten", "prims"):
        return None
    definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
    if definition is None:
        return None
    backends: Mapping[str | None, Callable[..., Any]] = definition._backend_fns
    return backends.get("cpu") or backends.get(None)


def run_steps(recording: Recording, storages: list[torch.UntypedStorage | None], *, poison: bool) -> None:
    """Replay on `storages`, from `Memory.resolve`.

    `poison`: memory that nobody has written is NaN (255 in every byte) until somebody does.

    Raises:
        GraphError: an operation whose result has another shape now.
    """
    views: dict[Ref, torch.Tensor] = {}
    ends: dict[int, list[int]] = {}
    for number, tracked in enumerate(recording.memory.tracked):
        if tracked.inside and tracked.kept is None:
            ends.setdefault(tracked.last_use, []).append(number)

    def view(ref: Ref) -> torch.Tensor:
        found = views.get(ref)
        if found is None:
            storage = storages[ref.storage]
            assert storage is not None
            found = views[ref] = build(ref, storage)
        return found

    for index, step in enumerate(recording.steps):
        if step.unwritten:
            _allocate(recording.memory, step, storages, poison)
        else:
            args, kwargs = _map((step.args, dict(step.kwargs)), Ref, view)
            _place(step, _flat(step.run(*args, **kwargs)), storages, view)
        for number in ends.get(index, ()):
            storages[number] = None
            for ref in [r for r in views if r.storage == number]:
                del views[ref]


def _allocate(memory: Memory, step: Step, storages: list[torch.UntypedStorage | None], poison: bool) -> None:
    for _, ref in step.results:
        if storages[ref.storage] is None:
            nbytes = memory.tracked[ref.storage].nbytes
            fresh = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
            storages[ref.storage] = fresh
            if poison:
                spoil(fresh)


def _place(
    step: Step,
    flat: Sequence[Any],
    storages: list[torch.UntypedStorage | None],
    view: Callable[[Ref], torch.Tensor],
) -> None:
    """Results go to their recorded memory; a temporary's memory is whatever its operation returned."""
    fresh = {ref.storage for _, ref in step.results if storages[ref.storage] is None}
    for place, ref in step.results:
        result = flat[place]
        if (tuple(result.shape), result.dtype) != (ref.size, ref.dtype):
            raise GraphError(
                f"{step.name} made another shape than during the capture",
                asked=f"{list(result.shape)} at {step.where}",
                allowed=list(ref.size),
                hint="its result depends on device values: it can't stand in a graph",
            )
        if ref.storage in fresh:
            storages[ref.storage] = result.untyped_storage()
        else:
            view(ref).copy_(result)


def _map(value: Any, kind: type[Any], fn: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return fn(value)
    if type(value) in (tuple, list):
        return type(value)(_map(x, kind, fn) for x in value)
    if isinstance(value, dict):
        return {k: _map(x, kind, fn) for k, x in value.items()}
    return value


def _flat(value: Any) -> list[Any]:
    return [y for x in value for y in _flat(x)] if isinstance(value, (tuple, list)) else [value]


def _refs(value: Any) -> list[Ref]:
    found: list[Ref] = []
    _map(value, Ref, found.append)
    return found
