"""A roofline of a result: SVG by hand, any other format by matplotlib where it is installed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from anyattn.bench.cells import Cell
from anyattn.bench.outputs import write_text
from anyattn.errors import ConfigError

__all__ = ["Point", "plot", "points", "svg"]

Point = tuple[str, str, float, float]
"""Name, cell, operations a byte, TFLOP/s."""

_COLORS = ("#0b6e99", "#d9480f", "#2b8a3e", "#862e9c", "#e8a100", "#c2255c", "#495057", "#5c940d", "#1864ab",
           "#a61e4d")  # fmt: skip
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 960, 560, 70, 50, 40, 260


def points(document: Mapping[str, Any]) -> list[Point]:
    """Every result as a place in the plane."""
    found = []
    for entry in document["cells"]:
        work = Cell.from_json(entry["cell"]).work()
        label = f"{entry['cell']['name']} {entry['mode']}"
        found += [
            (str(r["name"]), label, work.flops / work.bytes, float(r["tflop_s"])) for r in entry["results"]
        ]
    return found


def plot(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the roofline.

    Raises:
        ConfigError: nothing was measured, matplotlib is wanted and isn't there, or no file can be written.
    """
    if not points(document) or not document["limits"]:
        raise ConfigError("a roofline needs results and limits", asked=f"{len(document['cells'])} cells")
    target = Path(path)
    if target.suffix.lower() == ".svg":
        write_text("--plot", target, svg(document))
        return
    try:
        from matplotlib import pyplot  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        hint = "name it .svg, or pip install matplotlib"
        raise ConfigError("--plot", asked=str(path), allowed="a file .svg", hint=hint) from error
    _matplotlib(pyplot, document, target)


def _roof(limits: Mapping[str, Any], intensity: float) -> float:
    return float(min(limits["gemm_tflop_s"], intensity * limits["read_gb_s"] / 1e3))


def _matplotlib(pyplot: Any, document: Mapping[str, Any], target: Path) -> None:
    limits, found = document["limits"], points(document)
    low, high = min(p[2] for p in found) / 2, max(p[2] for p in found) * 2
    figure, axes = pyplot.subplots(figsize=(11, 6.5))
    roof = [low * (high / low) ** (i / 200) for i in range(201)]
    axes.plot(roof, [_roof(limits, x) for x in roof], color="black", label="limits of this run")
    for name in dict.fromkeys(p[0] for p in found):
        own = [p for p in found if p[0] == name]
        axes.scatter([p[2] for p in own], [p[3] for p in own], s=18, label=name)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s", title=_title(document))
    axes.legend(fontsize=7)
    try:
        figure.savefig(target, dpi=150, bbox_inches="tight")
    except (OSError, ValueError) as error:  # ValueError: an ending that it doesn't know
        hint = "name it .svg or .png, in a folder that is there"
        raise ConfigError("--plot can't be written", asked=f"{target}: {error}", hint=hint) from error
    finally:
        pyplot.close(figure)


def _title(document: Mapping[str, Any]) -> str:
    return f"{document['device']}, {document['date'][:10]}"


class _Axes:
    """Logarithmic coordinates of the page."""

    def __init__(self, found: Sequence[Point], peak: float) -> None:
        self.x0, self.x1 = _decades([p[2] for p in found])
        self.y0, self.y1 = _decades([*(p[3] for p in found), peak])

    def x(self, value: float) -> float:
        """From operations a byte."""
        share = (math.log10(value) - self.x0) / (self.x1 - self.x0)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """From TFLOP/s."""
        share = (math.log10(value) - self.y0) / (self.y1 - self.y0)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def svg(document: Mapping[str, Any]) -> str:
    """The picture: a circle a result, its cell and rate as a tooltip, the limits of the run as a line."""
    limits, found = document["limits"], points(document)
    axes = _Axes(found, limits["gemm_tflop_s"])
    names = list(dict.fromkeys(p[0] for p in found))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(_title(document))}</text>',
        *_grid(axes),
        _roof_line(axes, limits),
    ]
    for name, cell, intensity, rate in found:
        color = _COLORS[names.index(name) % len(_COLORS)]
        tip = escape(f"{name}: {cell}, {rate:.3g} TFLOP/s")
        parts.append(
            f'<circle cx="{axes.x(intensity):.1f}" cy="{axes.y(rate):.1f}" r="4" fill="{color}" '
            f'fill-opacity="0.75"><title>{tip}</title></circle>'
        )
    for row, name in enumerate(names):
        y = _TOP + 16 * row
        color = _COLORS[row % len(_COLORS)]
        parts.append(f'<circle cx="{_WIDTH - _RIGHT + 14}" cy="{y}" r="4" fill="{color}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 24}" y="{y + 4}" font-size="11">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(axes: _Axes) -> Iterator[str]:
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    for power in range(axes.x0, axes.x1 + 1):
        x = axes.x(10.0**power)
        yield f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{floor}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{10.0**power:g}</text>'
    for power in range(axes.y0, axes.y1 + 1):
        y = axes.y(10.0**power)
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    middle = (_LEFT + right) // 2
    yield f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">operations a byte</text>'
    yield f'<text x="16" y="{_TOP - 8}">TFLOP/s</text>'


def _roof_line(axes: _Axes, limits: Mapping[str, Any]) -> str:
    steps = [10 ** (axes.x0 + (axes.x1 - axes.x0) * i / 100) for i in range(101)]
    shown = [(x, _roof(limits, x)) for x in steps]
    inside = [(x, y) for x, y in shown if y >= 10.0**axes.y0]
    path = " ".join(f"{axes.x(x):.1f},{axes.y(y):.1f}" for x, y in inside)
    return f'<polyline points="{path}" fill="none" stroke="black" stroke-width="1.5"/>'
