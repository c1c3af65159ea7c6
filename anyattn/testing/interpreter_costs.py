"""What Triton's interpreter does again and again for nothing, done once: the same numbers in half the time.

Every call of a device function searches five namespaces of Triton for builtins, which the launch around it
has replaced; every cast builds a table of all types; every integer sum is made a second time for an overflow
check that asserts nothing unless the interpreter's `debug` option is on.

And one fault of it is mended: a comparison keeps the type of what was compared beside numbers that are bool,
so that, spread over a block, it becomes an integer, which Triton 3.9's interpreter takes for no mask.
"""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["spare_interpreter"]


def spare_interpreter() -> None:
    """Spare this process's interpreter those costs. What a Triton version has otherwise is left as it is."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    if _takes(interpreter, "_patch_builtin", "pkg", "builder", "scope") and _takes(
        interpreter, "_patch_attr", "obj", "name", "member", "builder", "scope"
    ):
        _search_once(interpreter, tl)
    if _takes(interpreter, "_get_np_dtype", "tt_dtype"):
        _look_up_once(interpreter, tl)
    if _takes(TritonSemantic, "binary_op_sanitize_overflow_impl", "self", "lhs", "rhs", "binary_op"):
        _check_where_it_counts(TritonSemantic)
    if _takes(interpreter.InterpreterBuilder, "create_splat", "self", "ret_ty", "arg"):
        _spread_as_it_is(interpreter)


def _takes(owner: Any, name: str, *parameters: str) -> bool:
    """True for a function as it is known here that isn't replaced yet."""
    function = getattr(owner, name, None)
    if function is None or getattr(function, "__module__", None) == __name__:
        return False
    return tuple(inspect.signature(function).parameters) == parameters


def _search_once(interpreter: Any, tl: Any) -> None:
    """A namespace's builtins are replaced all together, and put back so: the first tells of the rest."""
    plain = interpreter._patch_builtin
    builtins = {
        pkg: [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
        for pkg in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
    }

    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        names = builtins.get(pkg)
        if not names:
            plain(pkg, builder, scope)
        elif tl.core.is_builtin(getattr(pkg, names[0])):
            for name in names:
                interpreter._patch_attr(pkg, name, getattr(pkg, name), builder, scope)

    interpreter._patch_builtin = patch_builtin


def _look_up_once(interpreter: Any, tl: Any) -> None:
    plain = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        kind = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        if type(kind) is not tl.dtype:  # pointers, which are looked up in no table
            return plain(kind)
        if kind.name not in known:
            known[kind.name] = plain(kind)
        return known[kind.name]

    interpreter._get_np_dtype = get_np_dtype


def _check_where_it_counts(semantic: Any) -> None:
    plain = semantic.binary_op_sanitize_overflow_impl

    def sanitize_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:  # else `device_assert`, its last step, does nothing
            plain(self, lhs, rhs, binary_op)

    semantic.binary_op_sanitize_overflow_impl = sanitize_overflow


def _spread_as_it_is(interpreter: Any) -> None:
    plain = interpreter.InterpreterBuilder.create_splat

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        made = plain(self, ret_ty, arg)
        if arg.data.dtype == bool and made.data.dtype != bool:
            made.data = made.data.astype(bool)
        return made

    interpreter.InterpreterBuilder.create_splat = create_splat
