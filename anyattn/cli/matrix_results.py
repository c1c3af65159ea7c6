"""Results of `anyattn verify --json` and `verify-compile --json` as small summaries: `ci/results/*.json`."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anyattn.errors import ConfigError

__all__ = ["HOW", "Result", "load_results", "read_document", "summarise", "write_result"]

HOW = ("native", "emulated", "interpreted", "compiled")
"""How something ran: on the chip; on a stand-in for its library; in Triton's interpreter; not at all."""

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run of one backend. `cells` maps `platform:arch` to (passed, failed)."""

    backend: str
    models: str
    how: str
    cells: Mapping[str, tuple[int, int]]
    date: str
    commit: str
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    skipped: int = 0
    worst_error: float | None = None
    failures: tuple[str, ...] = ()
    note: str = ""

    @property
    def filename(self) -> str:
        """Of the summary; a run of the same day takes the place of an earlier one."""
        where = next(iter(self.cells)).replace(":", "-") if len(self.cells) == 1 else "chips"
        return f"{self.date}-{self.backend}-{self.models}-{where}-{self.how}.json"

    @property
    def ran_on(self) -> str:
        """Versions in a line, `python` left out."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items() if name != "python")


def read_document(path: Path) -> Mapping[str, Any]:
    """The JSON that a command printed. Raises `ConfigError`."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(document, dict):
        raise _unreadable(path, f"a {type(document).__name__}")
    return document


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        "a result that can't be read",
        asked=f"{path}: {why}",
        allowed="what `anyattn verify … --json` or `anyattn verify-compile --json` prints",
        hint="run it again, with its standard output in the file",
    )


def summarise(document: Mapping[str, Any], *, date: str, commit: str, note: str = "") -> tuple[Result, ...]:
    """Summaries of one document: one a backend and kind of model.

    Raises:
        ConfigError: a document of another kind, a date that isn't YYYY-MM-DD, a commit that isn't one.
    """
    if not _is_past_day(date):
        allowed = "YYYY-MM-DD, no day to come"
        raise ConfigError("--date", asked=date, allowed=allowed, hint="the day of the run, in UTC")
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        hint = "`git rev-parse HEAD` where it ran"
        raise ConfigError("--commit", asked=commit, allowed="7 to 40 hex digits", hint=hint)
    when = {"date": date, "commit": commit[:10], "note": note}
    try:
        if "configurations" in document:
            found = _compiled(document, when)
        else:
            found = (_latent(document, when) if document.get("kind") == "mla" else _dense(document, when),)
        for result in found:
            _check_counts(result)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable(Path("the document"), f"{type(error).__name__}: {error}") from error
    return found


def _is_past_day(date: str) -> bool:
    """A day of the calendar, not behind today (a machine's clock may be a day ahead of ours)."""
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError:
        return False
    today = datetime.datetime.now(datetime.UTC).date()
    return len(date) == len("YYYY-MM-DD") and day <= today + datetime.timedelta(days=1)


def _check_counts(result: Result) -> None:
    """Raises `ValueError` for a run in which nothing was judged, and for numbers that are none."""
    for passed, failed in result.cells.values():
        if not isinstance(passed, int) or passed < 0 or passed + failed == 0:
            raise ValueError(f"{passed} passed, {failed} failed: nothing that was judged")
    if result.worst_error is not None and not math.isfinite(result.worst_error):
        raise ValueError(f"worst_error = {result.worst_error}")
    if not all(isinstance(version, str) for version in result.versions.values()):
        raise ValueError("versions that are no texts")


def _dense(document: Mapping[str, Any], when: Mapping[str, str]) -> Result:
    host, failed = document["host"], document["failed"]
    return Result(
        backend=document["backend"],
        models="dense",
        how=host["kernels"],
        cells={host["target"]: (document["passed"], len(failed))},
        device="" if host["kernels"] == "emulated" else host["name"],
        versions=host["versions"],
        skipped=len(document["skipped"]),
        worst_error=max(document["worst_error"].values(), default=None),
        failures=tuple(str(entry["name"]) for entry in failed[:_SHOWN]),
        date=when["date"],
        commit=when["commit"],
        note=when["note"],
    )


def _latent(document: Mapping[str, Any], when: Mapping[str, str]) -> Result:
    own = document["target"].startswith("cpu:") and document["backend"] == "triton"
    how = "emulated" if document["emulated"] else "interpreted" if own else "native"
    return Result(
        backend=document["backend"],
        models="mla",
        how=how,
        cells={document["target"]: (document["passed"], document["cases"] - document["passed"])},
        device="" if how == "emulated" else document.get("name", ""),
        versions=document.get("versions", {}),
        skipped=document["left_out"],
        worst_error=max(document["worst"].values(), default=None),
        failures=tuple(str(entry["case"]) for entry in document["failed"][:_SHOWN]),
        date=when["date"],
        commit=when["commit"],
        note=when["note"],
    )


def _compiled(document: Mapping[str, Any], when: Mapping[str, str]) -> tuple[Result, ...]:
    """Latent kernels have entries of their own. Lanes for other compilers name their backend."""
    entries: dict[str, list[Mapping[str, Any]]] = {}
    for entry in document["configurations"]:
        entries.setdefault("mla" if str(entry["entry"]).startswith("mla") else "dense", []).append(entry)
    return tuple(
        Result(
            backend=document.get("backend", "triton"),
            models=models,
            how="compiled",
            cells=_per_chip(found),
            versions=document["versions"],
            failures=tuple(f"{e['entry']} {e['target']}" for e in found if not e["ok"])[:_SHOWN],
            date=when["date"],
            commit=when["commit"],
            note=when["note"],
        )
        for models, found in entries.items()
    )


def _per_chip(entries: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    counts: dict[str, tuple[int, int]] = {}
    for entry in entries:
        name = str(entry["target"])
        chip = f"cuda:{name.replace('_', '')}" if name.startswith("sm") else f"rocm:{name}"
        passed, failed = counts.get(chip, (0, 0))
        counts[chip] = (passed + bool(entry["ok"]), failed + (not entry["ok"]))
    return counts


def load_results(folder: Path) -> tuple[Result, ...]:
    """All summaries, oldest first. Raises `ConfigError` for a file that isn't one."""
    found = []
    for path in sorted(folder.glob("*.json")):
        data = dict(read_document(path))
        try:
            cells = {chip: (int(counts[0]), int(counts[1])) for chip, counts in data.pop("cells").items()}
            result = Result(cells=cells, failures=tuple(data.pop("failures", ())), **data)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise _unreadable(path, f"{type(error).__name__}: {error}") from error
        if result.how not in HOW:
            raise ConfigError(f"how {path.name} ran", asked=result.how, allowed=", ".join(HOW))
        found.append(result)
    return tuple(sorted(found, key=lambda result: (result.date, result.filename)))


def write_result(result: Result, folder: Path) -> Path:
    """Write the summary, in the place of an older one of that name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result.filename
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
    return path
