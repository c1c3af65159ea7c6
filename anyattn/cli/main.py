"""Entry point of `anyattn`: finds the command, loads its module alone, and turns errors into one line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from anyattn.errors import AnyattnError, LibraryError, UnknownNameError

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("anyattn.cli.doctor", "what this machine has, what each backend lacks, what to do next"),
    "backends": ("anyattn.cli.backends", "which backend serves what, on this machine or any other"),
    "select": ("anyattn.cli.select", "choose the backends for a model, and say why"),
    "generate": ("anyattn.cli.generate", "text from a small real model through the chosen backends"),
    "verify": ("anyattn.cli.verify", "prove a backend on this machine: thousands of cases, and its promises"),
    "verify-compile": (
        "anyattn.cli.verify_compile",
        "compile the Triton kernels for chips that aren't there",
    ),
}
"""Command -> (module, help). A module has `add_arguments(parser)` and `run(args) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 wrong usage or a request that can't be met."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except AnyattnError as error:
        print(f"anyattn: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `anyattn … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if argv[0] in ("-V", "--version"):
        from anyattn import __version__

        print(f"anyattn {__version__}")
        return 0
    if argv[0].startswith("-"):
        raise UnknownNameError("option before the command", argv[0], ("--help", "--version"))
    if argv[0] not in COMMANDS:
        raise UnknownNameError("command", argv[0], COMMANDS)
    module = _load(argv[0])
    args = _parse(argv[0], module, argv[1:])
    code = module.run(args)
    sys.stdout.flush()  # a closed pipe shows here, not after main
    return int(code)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: anyattn COMMAND [options]",
            "",
            "The attention layer for LLM inference that runs on whatever accelerator is there.",
            "",
            *lines,
            "",
            "`anyattn COMMAND --help` lists the options; each command has --json.",
        ]
    )


def _load(command: str) -> ModuleType:
    try:
        return importlib.import_module(COMMANDS[command][0])
    except AnyattnError:
        raise
    except Exception as error:  # a broken torch raises anything
        raise LibraryError(
            f"the command {command} can't be loaded",
            asked=command,
            allowed="doctor, which works without torch",
            hint=f"{type(error).__name__}: {error}; run `anyattn doctor`",
        ) from error


def _parse(command: str, module: ModuleType, argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"anyattn {command}",
        description=module.__doc__,
        allow_abbrev=False,
        conflict_handler="resolve",  # a command may define its own --json
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    module.add_arguments(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        options = [name for name in parser._option_string_actions if name.startswith("--")]
        raise UnknownNameError(f"argument of anyattn {command}", unknown[0].partition("=")[0], options)
    return args


if __name__ == "__main__":
    sys.exit(main())
