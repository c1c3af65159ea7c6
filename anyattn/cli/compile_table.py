"""The compile table as text: one line a target, one section an entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyattn.kernels.triton.aot_report import Report

__all__ = ["markdown", "outcome"]

_HEAD = (
    "| target | blocks | warps, stages | shared memory, of | registers | spills | waves "
    "| matrix instructions | loads | s |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def outcome(report: Report) -> str:
    """One line on one target: what it costs, or what is wrong."""
    if report.usage is None:
        return f"FAILED: {'; '.join(report.problems)}"
    usage = report.usage
    matrix = f", {usage.matrix[0]}" if usage.matrix else ""
    text = f"{usage.registers} registers, {usage.shared} B shared, spills {usage.spills}{matrix}"
    return f"FAILED: {'; '.join(report.problems)} ({text})" if report.problems else text


def markdown(reports: Sequence[Report], versions: Mapping[str, str], *, seconds: float, workers: int) -> str:
    """The whole table. Written by `make compile-table`."""
    names = list(dict.fromkeys(report.entry for report in reports))
    failed = sum(bool(report.problems) for report in reports)
    noted = sum(bool(report.notes) for report in reports)
    compiler = ", ".join(f"{name} {version}" for name, version in versions.items())
    intro = f"""# What the Triton kernels compile to

Written by `make compile-table`: {len(names)} configurations, {len(reports)} compilations with {compiler},
{seconds:.0f} s in {workers} processes; {failed} failed, {noted} stand with a stated reason.
Compiled, not run: nothing here says that a chip was at hand.

"blocks" are the kernel's BLOCK_… constants. "shared memory, of" is what a thread block asks for and what the
chip grants one block at most. Registers are per thread (AMD: vector registers, accumulation registers
included). Spills are stack or scratch bytes per thread. "waves" is AMD's occupancy per SIMD as its compiler
reports it. "loads" are the instructions that read global memory, by the bytes a thread reads at once,
asynchronous copies included: decode and extend fail where K and V aren't read in vectors. A configuration is
what the package would launch: the host function is called with tensors on the meta device, and its launch is
compiled instead of started.
"""
    sections = [_section(name, [r for r in reports if r.entry == name]) for name in names]
    return "\n".join([intro, *sections])


def _section(name: str, reports: Sequence[Report]) -> str:
    kernel = reports[0].kernel
    lines = [f"## {name}", "", f"`{kernel}`" if kernel else "", "", _HEAD, *map(_row, reports)]
    remarks = [f"- {r.target}: {text}" for r in reports for text in _remarks(r)]
    return "\n".join([*lines, *(["", *remarks] if remarks else []), ""])


def _remarks(report: Report) -> Iterable[str]:
    yield from (f"**{problem}**" for problem in report.problems)
    yield from report.notes


def _row(report: Report) -> str:
    options = f"{report.options.get('num_warps', '')}, {report.options.get('num_stages', '')}"
    if report.usage is None:
        return f"| {report.target} | {_blocks(report)} | {options} | **failed** | | | | | | |"
    usage = report.usage
    cells = (
        report.target,
        _blocks(report),
        options,
        f"{usage.shared:,} of {report.shared_limit:,}",
        usage.registers,
        usage.spills,
        "" if usage.occupancy is None else usage.occupancy,
        ", ".join(usage.matrix) or "none",
        ", ".join(f"{count} of {size} B" for size, count in reversed(usage.loads.items())),
        report.seconds,
    )
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _blocks(report: Report) -> str:
    found = {
        name.removeprefix("BLOCK_"): n for name, n in report.constexprs.items() if name.startswith("BLOCK_")
    }
    return ", ".join(f"{name} {n}" for name, n in found.items())
