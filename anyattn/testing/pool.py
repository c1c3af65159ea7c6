"""Items spread over worker processes. A worker that dies, hangs or poisons its device costs one item.

Each worker is a process of its own that reads items as JSON lines and writes results as JSON lines: compiled
kernels are spread over cores, and a crash of a kernel is one failed item instead of the end of the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from anyattn.testing.cases import parse_case
from anyattn.testing.deck import Deck
from anyattn.testing.kit import Result
from anyattn.testing.plan import Item

__all__ = [
    "POISON",
    "answer",
    "decode_item",
    "decode_result",
    "encode_item",
    "encode_result",
    "poisoned",
    "run_in_workers",
]

_TIMEOUT = 300.0  # seconds for one item; a kernel may be compiled in it

POISON = ("CUDA error", "device-side assert", "HIP error", "illegal memory access")
"""After these nothing more runs on the device in that process: it ends with its answer."""


def encode_item(item: Item) -> str:
    """One JSON line."""
    return json.dumps({"check": item.check, "case": repr(item.case), "name": item.name})


def decode_item(line: str) -> Item:
    """The item of a line."""
    data = json.loads(line)
    return Item(data["check"], parse_case(data["case"]), data["name"])


def encode_result(result: Result) -> str:
    """One JSON line, without the item."""
    fields = {name: getattr(result, name) for name in ("error", "why", "skipped", "seconds")}
    return json.dumps(fields)


def decode_result(line: str, item: Item) -> Result:
    """The result of a line."""
    return Result(item, **json.loads(line))


class _Worker:
    """One process, started when it gets its first item and again after it ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command, self._process = list(command), None  # type: tuple[list[str], subprocess.Popen[str] | None]

    def run(self, item: Item) -> Result:
        process = self._process
        if process is None:
            # The workers are the parallelism: Inductor would start a pool of compilers in each of them.
            environ = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ, "OMP_NUM_THREADS": "1"}
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
            )
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(_TIMEOUT, process.kill)
        timer.start()
        try:
            process.stdin.write(encode_item(item) + "\n")
            process.stdin.flush()
            line = _answer(process.stdout)
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            result = decode_result(line, item)
            if poisoned(result):  # the next item gets a fresh process, not this one's last moments
                process.wait()
                self._process = None
            return result
        code = process.wait()
        self._process = None
        return Result(item, why=f"the process ended (exit status {code}) or took over {_TIMEOUT:.0f} s")

    def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


_MARK = "result "


def _answer(stdout: IO[str]) -> str:
    """The next result; whatever else a library prints to stdout is passed over."""
    for line in stdout:
        if line.startswith(_MARK):
            return line.removeprefix(_MARK)
    return ""


def run_in_workers(
    items: Iterable[Item],
    backend: str,
    device: str,
    workers: int,
    done: Callable[[Result], None] | None = None,
    host: str | None = None,
) -> list[Result]:
    """Results in the order of the items; with `host`, each worker puts its own stand-ins in place."""
    wanted = list(items)
    deck = Deck(wanted)
    results: list[Result | None] = [None] * len(wanted)
    command = [sys.executable, "-m", "anyattn.testing.worker", backend, device, *([host] if host else [])]
    lock = threading.Lock()

    def serve() -> None:
        worker = _Worker(command)
        last: Item | None = None
        while (taken := deck.take(last)) is not None:
            index, last = taken
            result = results[index] = worker.run(last)
            if done is not None:
                with lock:
                    done(result)
        worker.close()

    threads = [threading.Thread(target=serve) for _ in range(max(1, min(workers, len(wanted))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [r for r in results if r is not None]


def poisoned(result: Result) -> bool:
    """The item left the device unusable for its process."""
    return result.why is not None and any(word in result.why for word in POISON)


def answer(result: Result, stream: Any) -> None:
    """Write one result where `run_in_workers` reads it."""
    stream.write(f"{_MARK}{encode_result(result)}\n")
    stream.flush()
