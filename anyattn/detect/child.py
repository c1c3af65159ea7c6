"""Imports modules in a process of their own and says how that ended, whatever they do to the process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import IO, Any

__all__ = ["Attempt", "Outcome", "attempt"]

SCRIPT = """\
import importlib, json, os, sys
task = json.loads(sys.argv[1])
sys.path[:] = task["path"]
def say(**what):
    os.write(task["pipe"], (json.dumps(what) + "\\n").encode())
module = None
try:
    for name in task["imports"]:
        say(step="import " + name)
        module = importlib.import_module(name)
    for name in task["attributes"]:
        say(step="look up " + module.__name__ + "." + name)
        getattr(module, name)
except SystemExit as error:
    say(kind="exit", error="SystemExit", text=str(error.code)[:500])
except BaseException as error:
    kind = "import_error" if isinstance(error, ImportError) else "exception"
    missing = getattr(error, "name", None) if type(error).__name__ == "ModuleNotFoundError" else None
    say(kind=kind, error=type(error).__name__, text=str(error)[:500], missing=missing)
else:
    say(kind="usable")
os._exit(0)  # a library's exit handlers are of no interest
"""


class Outcome(Enum):
    """How a probe ended."""

    USABLE = "usable"
    MISSING = "missing"  # the distribution isn't installed
    SHADOWED = "shadowed"  # its module isn't its own: importing it would prove nothing
    TORCH = "torch"  # `import torch` fails before the library's turn
    IMPORT_ERROR = "import_error"
    EXCEPTION = "exception"  # any other exception while importing or looking up names
    EXIT = "exit"  # the import ended the process
    SIGNAL = "signal"  # the import killed the process
    TIMEOUT = "timeout"
    NOT_STARTED = "not_started"  # no child process could be started


@dataclass(frozen=True)
class Attempt:
    """One child process: how it ended, in which step, with which message.

    `missing` is the module that a `ModuleNotFoundError` names; `seconds` is wall-clock time.
    """

    outcome: Outcome
    step: str = ""
    detail: str = ""
    missing: str | None = None
    seconds: float = 0.0


def attempt(
    imports: Sequence[str],
    attributes: Sequence[str] = (),
    *,
    path: Sequence[str],
    environ: Mapping[str, str],
    timeout: float,
) -> Attempt:
    """Import `imports` in order, then look up `attributes` in the last of them. Never raises.

    The child gets this interpreter, `path` as its `sys.path`, and `timeout` seconds.
    """
    start = time.monotonic()
    reader, writer = os.pipe()
    try:
        task = {"path": list(path), "pipe": writer, "imports": list(imports), "attributes": list(attributes)}
        command = [sys.executable, "-P", "-c", SCRIPT, json.dumps(task)]
        with _scratch() as errors:
            code = _run(command, writer, errors, environ, timeout)
            tail = _last_line(errors)
        said = _received(reader)
    except OSError as error:
        return Attempt(Outcome.NOT_STARTED, detail=f"no child process: {error}")
    finally:
        os.close(reader)
        os.close(writer)
    return _judge(said, code, tail, timeout, time.monotonic() - start)


def _scratch() -> Any:
    """A file for what the child prints: unlike a pipe, it can't block or outlive the child."""
    try:
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.devnull, "r+b")


def _run(
    command: list[str], writer: int, errors: IO[bytes], environ: Mapping[str, str], timeout: float
) -> int | None:
    """Exit code of the child, negative for a signal, None when its time was up."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=errors,
        stderr=errors,
        pass_fds=(writer,),
        env=dict(environ),
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(OSError):  # whatever the child started goes with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _received(reader: int) -> list[dict[str, Any]]:
    os.set_blocking(reader, False)
    try:
        text = os.read(reader, 1 << 16)
    except BlockingIOError:
        return []
    return [json.loads(line) for line in text.decode().splitlines() if line.endswith("}")]


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 2000))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:500] if lines else ""


def _judge(
    said: list[dict[str, Any]], code: int | None, tail: str, timeout: float, seconds: float
) -> Attempt:
    step = next((entry["step"] for entry in reversed(said) if "step" in entry), "start Python")
    end = next((entry for entry in said if "kind" in entry), None)
    if end is not None:
        outcome = Outcome(end["kind"])
        detail = "" if outcome is Outcome.USABLE else f"{end['error']}: {end['text']}"
        missing = end.get("missing")
    else:
        missing = None
        if code is None:
            outcome, detail = Outcome.TIMEOUT, f"not done after {timeout:g} s"
        elif code < 0:
            outcome, detail = Outcome.SIGNAL, f"killed by {_signal_name(-code)}"
        else:
            outcome, detail = Outcome.EXIT, f"the process ended with code {code}"
        detail += f" ({tail})" if tail else ""
    if step == "import torch" and outcome not in (Outcome.USABLE, Outcome.TIMEOUT):
        outcome = Outcome.TORCH
    return Attempt(outcome, step, detail, missing, seconds)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
