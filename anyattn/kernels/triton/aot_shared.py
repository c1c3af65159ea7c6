"""Shared memory that a kernel gives away while a copy to it is on its way.

Triton places what threads exchange (reductions, layout conversions) where no buffer lives any more, and to
it a buffer lives until its last use in the code: a copy that was started ahead and that nobody waits for
lands in the exchange. What it spoils depends on when it lands, so that runs on a device hardly show it;
where things lie does, without a device.
"""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["late_copies", "placed"]

_ALLOC = re.compile(
    r"(%\w+) = ttg\.local_alloc .*\{.*allocation\.offset = (\d+).*!ttg\.memdesc<((?:\d+x)+)(\w+),"
)
_VIEW = re.compile(r"(%\w+) = ttg\.memdesc_\w+ (%\w+)")
_COPY = re.compile(r"ttg\.async_copy_global_to_local %\w+, (%\w+)")
_WAIT = re.compile(r"ttg\.async_wait .*\{num = (\d+)")
_OFFSET = re.compile(r"allocation\.offset = (\d+)")
_BYTES = {"i64": 8, "f32": 4, "i32": 4, "bf16": 2, "f16": 2, "i16": 2}


def placed(ttgir: str, capability: int) -> str:
    """A kernel's TTGIR as it is when shared memory was given out, by the passes of Triton's own compiler."""
    from triton._C import libtriton

    lib: Any = libtriton
    context = lib.ir.context()
    lib.ir.load_dialects(context)
    lib.nvidia.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ttgir"
        path.write_text(ttgir)
        module = lib.ir.parse_mlir_module(str(path), context)
    module.context = context
    manager = lib.ir.pass_manager(context)
    lib.passes.ttgpuir.add_allocate_warp_groups(manager)
    lib.passes.convert.add_scf_to_cf(manager)
    lib.nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, 83)
    manager.run(module, "allocate_shared_memory")
    return str(module.str_nodebug())


def late_copies(text: str) -> list[str]:
    """Places in `text`, as `placed` gives it, where memory is used anew that a copy may still be written to.

    Read from top to bottom: within loops, buffers that live over the loop's end overlap nothing.
    """
    buffers: dict[str, tuple[int, int]] = {}
    origin: dict[str, str] = {}
    pending: set[str] = set()
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if view := _VIEW.search(line):
            origin[view[1]] = origin.get(view[2], view[2])
        if copy := _COPY.search(line):
            root = origin.get(copy[1], copy[1])
            pending |= {root} if root in buffers else set(buffers)  # handed over: it may be any of them
        if (wait := _WAIT.search(line)) and int(wait[1]) == 0:
            pending.clear()
        offset = _OFFSET.search(line)
        if offset is None:
            continue
        at = int(offset[1])
        found += [
            f"line {number} uses byte {at}, which copies to {name} may still be written to"
            for name in sorted(pending)
            if buffers[name][0] <= at < buffers[name][1]
        ]
        if alloc := _ALLOC.search(line):
            size = math.prod(int(n) for n in alloc[3].split("x") if n) * _BYTES.get(alloc[4], 1)
            buffers[alloc[1]] = (at, at + size)
    return found
