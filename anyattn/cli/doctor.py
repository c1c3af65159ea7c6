"""What this machine has, what each backend lacks, and the next step.

Works where `import torch` fails: torch is only ever imported in a child process.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping

from anyattn.cli.diagnosis import (
    BackendStatus,
    Diagnosis,
    LibraryStatus,
    backend_statuses,
    library_statuses,
)
from anyattn.cli.doctor_measured import measured_lines, measured_tables
from anyattn.cli.next_steps import next_steps
from anyattn.core.facts import HostFacts
from anyattn.core.measure.use import TableUse
from anyattn.detect import (
    PluginReport,
    Plugins,
    ProbeReport,
    detect_machine,
    plugins,
    probe_all,
    simulate,
    with_probes,
)
from anyattn.env import check_environment
from anyattn.errors import ConfigError

__all__ = ["add_arguments", "diagnose", "render", "run"]


ARROW = "->"
_LONGEST = 86400
"""A day: more is a mistake, and infinity no time to wait for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `anyattn doctor`."""
    parser.add_argument("--device", help="torch device to look at (default: what torch can drive)")
    parser.add_argument("--assume", metavar="HOST", help="a simulated host, such as rocm:gfx942-triton")
    parser.add_argument("--probe", action="store_true", help="import every library, each in a child process")
    parser.add_argument("--fresh", action="store_true", help="ignore cached probe results")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="time for one probe (default: 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 0 whatever it is, as long as it could be made."""
    if args.assume and (args.device or args.probe):
        raise ConfigError(
            "a simulated host has no devices and libraries to look at",
            asked=f"--assume {args.assume} with --device or --probe",
            allowed="--assume alone",
        )
    if not 0 < args.timeout <= _LONGEST:
        raise ConfigError("time for a probe", asked=f"{args.timeout:g}", allowed=f"0 < seconds <= {_LONGEST}")
    host = _host(args)
    diagnosis = diagnose(host, probe_libraries=args.probe, timeout=args.timeout, fresh=args.fresh)
    print(json.dumps(diagnosis.to_json(), indent=2) if args.json else render(diagnosis))
    return 0


def _host(args: argparse.Namespace) -> HostFacts:
    """Without plugins where they can't be listed: doctor says so instead of failing."""
    try:
        found = plugins()
    except Exception:
        found = Plugins()
    return simulate(args.assume, found) if args.assume else detect_machine(args.device, found=found)


def diagnose(
    host: HostFacts, *, probe_libraries: bool = False, timeout: float = 60.0, fresh: bool = False
) -> Diagnosis:
    """Look at everything; torch is probed always (unless simulated), other libraries on request."""
    names = [name for name in host.libraries if probe_libraries or name == "torch"]
    reports: tuple[ProbeReport, ...] = ()
    if not host.simulated:
        reports = probe_all(host, names, timeout=timeout, fresh=fresh, done=_progress(len(names)))
    host = with_probes(host, reports)
    libraries = library_statuses(host, reports)
    torch = next(status for status in libraries if status.distribution == "torch")
    backends, notes = _backends(host, torch)
    notes += tuple(dict.fromkeys(report.note for report in reports if report.note))
    measured, unread = _measured(host)
    problems = _problems(host, torch, os.environ) + unread
    plugged = _plugins()
    steps = next_steps(host, torch, libraries, backends, probed=probe_libraries, plugged=plugged)
    return Diagnosis(
        host, torch, libraries, backends, probe_libraries, problems, steps, notes, plugged, measured
    )


def _progress(count: int) -> Callable[[ProbeReport], None]:
    def show(report: ProbeReport) -> None:
        if count > 1 and sys.stderr.isatty():
            state = "kept result" if report.cached else f"{report.seconds:.1f} s"
            print(f"probed {report.facts.distribution}: {report.outcome.value} ({state})", file=sys.stderr)

    return show


def _backends(host: HostFacts, torch: LibraryStatus) -> tuple[tuple[BackendStatus, ...], tuple[str, ...]]:
    """Statuses of all backends; when the catalog itself can't be read, none and a note."""
    try:
        return backend_statuses(plugins().records, host, torch), ()
    except Exception as error:  # doctor explains what is broken, it doesn't break with it
        return (), (f"backends can't be listed: {type(error).__name__}: {error}",)


def _plugins() -> tuple[PluginReport, ...]:
    try:
        return tuple(plugins().reports)
    except Exception:  # stands among the problems or the notes
        return ()


def _measured(host: HostFacts) -> tuple[tuple[TableUse, ...], tuple[str, ...]]:
    """Measured tables, or none and what is wrong with them."""
    try:
        return measured_tables(host), ()
    except Exception as error:
        return (), (str(error),)


def _problems(host: HostFacts, torch: LibraryStatus, environ: Mapping[str, str]) -> tuple[str, ...]:
    """What stands in the way of every backend."""
    problems = []
    if torch.state == "missing":
        problems.append("torch isn't installed")
    elif torch.state == "broken":
        problems.append(f"torch {torch.version or ''} doesn't import: {torch.reason}")
    try:
        check_environment(environ)
        plugins()
    except ConfigError as error:
        problems.append(str(error))
    except Exception as error:
        problems.append(f"what is built in can't be read: {type(error).__name__}: {error}")
    if environ.get("ANYATTN_ASSUME") and not host.simulated:
        problems.append(_assumed(environ["ANYATTN_ASSUME"]))
    return tuple(problems)


def _assumed(name: str) -> str:
    try:
        simulate(name)
    except Exception as error:  # an unknown name, or a plugin that breaks: no selection can be made
        return f"ANYATTN_ASSUME={name}: {error}"
    return f"ANYATTN_ASSUME={name}: selections are made for that host"


def render(diagnosis: Diagnosis, width: int | None = None) -> str:
    """The diagnosis as text."""
    width = width or min(120, shutil.get_terminal_size((100, 24)).columns)
    lines = [*_machine(diagnosis.host), ""]
    lines += _section("Problems", [f"  {text}" for text in diagnosis.problems])
    title = (
        "Libraries" if diagnosis.probed or diagnosis.host.simulated else "Libraries (not imported: --probe)"
    )
    lines += _section(title, [line for status in diagnosis.libraries for line in _library_lines(status)])
    lines += _section("Backends", _backend_lines(diagnosis.backends))
    lines += _section("Measured tables", measured_lines(diagnosis.measured))
    lines += _section("Plugins", [line for report in diagnosis.plugins for line in _plugin_lines(report)])
    lines += _section("Notes", [f"  {text}" for text in (*diagnosis.host.notes, *diagnosis.notes)])
    lines += _section("Next step", [f"  {text}" for text in diagnosis.next_steps])
    return "\n".join(_wrap(line, width) for line in lines).rstrip()


def _section(title: str, lines: Iterable[str]) -> list[str]:
    body = list(lines)
    return [title, *body, ""] if body else []


def _wrap(line: str, width: int) -> str:
    if line.lstrip().startswith(ARROW):  # to be copied whole
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=indent, break_on_hyphens=False)) or line


def _machine(host: HostFacts) -> list[str]:
    name = f"{host.device_name} ({host.target})"
    count = f"{host.device_count} × " if host.device_count > 1 else ""
    units = {"cuda": "SMs", "rocm": "CUs", "ascend": "AI cores", "cpu": "cores"}.get(host.platform, "units")
    parts = [f"{host.num_units} {units}"] if host.num_units else []
    parts += [f"{host.memory_bytes / 2**30:.0f} GiB"] if host.memory_bytes else []
    parts += [f"driver {host.driver}"] if host.driver else []
    runtime = {"cuda": "CUDA", "rocm": "ROCm", "ascend": "CANN"}.get(host.platform, "runtime")
    parts += [f"{runtime} {host.runtime}"] if host.runtime else []
    simulated = "Simulated machine" if host.simulated else "Machine"
    torch = f"torch {host.torch} (built for {host.torch_build})" if host.torch else "no torch"
    features = f"  {' '.join(sorted(host.features))}"
    return [
        f"{simulated}: {count}{name}, {', '.join(parts)}",
        f"  Python {host.python}, {torch}",
        *([features] if host.features else []),
    ]


def _library_lines(status: LibraryStatus) -> list[str]:
    name = f"{status.distribution} {status.version or ''}".strip()
    lines = [f"  {status.state:<10}{name:<38} {status.provides}"]
    lines += [f"            {status.reason}"] if status.reason else []
    return lines + _arrow(status.remedy)


def _arrow(remedy: str | None) -> list[str]:
    return [f"            {ARROW} {remedy}"] if remedy else []


def _plugin_lines(report: PluginReport) -> list[str]:
    what = report.group.rpartition(".")[2].removesuffix("s")
    lines = [f"  {report.state.value:<10}{report.name:<16} {what} of {report.origin}"]
    if report.fault is None:
        return lines
    return [*lines, f"            {report.fault.found}", *_arrow(report.fault.remedy)]


def _backend_lines(statuses: Iterable[BackendStatus]) -> list[str]:
    lines, elsewhere = [], []
    for status in statuses:
        if status.status == "other_hardware":
            elsewhere.append(status.backend)
            continue
        text = f"  {status.status.replace('_', ' '):<10}{status.backend:<16} "
        text += ", ".join(status.phases) or status.missing or ""
        if status.phases and status.missing:
            text += f" ({status.missing})"
        lines += [text, *_arrow(status.remedy)]
    if elsewhere:
        lines.append(f"  for other hardware: {', '.join(elsewhere)}")
    return lines
