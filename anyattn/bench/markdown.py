"""A result as Markdown tables, for a page of documentation: microseconds by cell, and the ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anyattn.bench.choice import routed_choice
from anyattn.bench.routed import routed
from anyattn.bench.summary import Spread, against_peers, group_of, grouped, head, policies, replay, times_of

__all__ = ["markdown"]

Entry = Mapping[str, Any]


def markdown(document: Mapping[str, Any]) -> str:
    """Machine and limits, a table a workload, ratios to peers, policies, routed choice, the replayed day."""
    entries = document["cells"]
    lines = [*(f"{line}  " for line in head(document)), "", f"    {document['command']}", ""]
    for group, members in grouped(entries, group_of).items():
        lines += [f"## {group}", "", *_cells(members), ""]
    lines += _spreads("Backends against the fastest peer (its time over theirs)", against_peers(entries))
    lines += _spreads("Policies (their time over ours)", policies(entries))
    for source, takers in routed(document).items():
        title = f"Routed choice, by {source} (their time over ours)"
        lines += _spreads(title, routed_choice(document, takers))
    day = replay(entries)
    if day:
        lines += ["## A day of chats, one layer", "", "| who | seconds of attention |", "| --- | --- |"]
        lines += [
            f"| {who} | {seconds:,.1f} |" for who, seconds in sorted(day.items(), key=lambda item: item[1])
        ]
        lines.append("")
    if document["left_out"]:
        lines += [f"Left out for time: {', '.join(document['left_out'])}.", ""]
    return "\n".join(lines)


def _cells(members: Sequence[Entry]) -> list[str]:
    """us of everybody who took part somewhere, the fastest in bold; GB/s or TFLOP/s of our best."""
    backends = list(dict.fromkeys(name for entry in members for name in times_of(entry, "backend")))
    peers = list(dict.fromkeys(name for entry in members for name in times_of(entry, "peer", counting=False)))
    head_row = ["cell", *backends, *peers, "best peer / best of ours", "our best, of limit"]
    rows = [_row(entry, backends, peers) for entry in members]
    return [_line(head_row), _line(["---"] * len(head_row)), *map(_line, rows)]


def _row(entry: Entry, backends: Sequence[str], peers: Sequence[str]) -> list[str]:
    ours, counted = times_of(entry, "backend"), times_of(entry, "peer")
    everybody = ours | times_of(entry, "peer", counting=False)
    best = min((ours | counted).values())
    cells = [_time(everybody.get(name), best) for name in (*backends, *peers)]
    ratio = f"{min(counted.values()) / min(ours.values()):.3f}" if ours and counted else "–"
    return [entry["cell"]["name"], *cells, ratio, _rate(entry)]


def _time(seconds: float | None, best: float) -> str:
    if seconds is None:
        return "–"
    text = f"{seconds * 1e6:,.1f}"
    return f"**{text}**" if seconds == best else text


def _rate(entry: Entry) -> str:
    own = [result for result in entry["results"] if result["kind"] == "backend"]
    if not own:
        return "–"
    best = min(own, key=lambda result: float(result["median_s"]))
    bound = best["tflop_s"] * 1e3 > 100 * best["gb_s"]
    rate = f"{best['tflop_s']:,.1f} TFLOP/s" if bound else f"{best['gb_s']:,.0f} GB/s"
    return f"{rate}, {100 * best.get('of_limit', 0):.0f} %"


def _spreads(title: str, found: Mapping[str, Mapping[str, Spread]]) -> list[str]:
    if not found:
        return []
    lines = [
        f"## {title}",
        "",
        "| cells | who | geometric mean | worst | where |",
        "| --- | --- | --- | --- | --- |",
    ]
    for group, rows in found.items():
        for name, spread in rows.items():
            where = spread.where.rpartition(" ")[0]
            cells = [f"{group} ({spread.count})", name, f"{spread.mean:.3f}", f"{spread.worst:.3f}", where]
            lines.append(_line(cells))
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
