"""Entry point of `anyattn`: finds the command, loads its module alone, and turns errors into one line."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from anyattn import env
from anyattn.errors import AnyattnError, ConfigError, LibraryError, UnknownNameError

__all__ = ["COMMANDS", "main"]

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("anyattn.cli.doctor", "what this machine has, what each backend lacks, what to do next"),
    "backends": ("anyattn.cli.backends", "which backend serves what, on this machine or any other"),
    "select": ("anyattn.cli.select", "choose the backends for a model, and say why"),
    "generate": ("anyattn.cli.generate", "text from a small real model through the chosen backends"),
    "bench": (
        "anyattn.cli.bench",
        "time every backend on this machine, beside the libraries called directly",
    ),
    "verify": ("anyattn.cli.verify", "prove a backend on this machine: thousands of cases, and its promises"),
    "verify-compile": (
        "anyattn.cli.verify_compile",
        "compile the Triton kernels for chips that aren't there",
    ),
    "matrix": ("anyattn.cli.matrix", "CI lanes as data, pipelines from them, support tables from results"),
    "diff": ("anyattn.cli.diff", "what changed between two measurements, decisions or machines"),
    "lint": ("anyattn.cli.lint", "find what a graph can't hold in the code that it records"),
}
"""Command -> (module, help). A module has `add_arguments(parser)` and `run(args) -> exit code`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 2 wrong usage or a request that can't be met."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(given)
    except AnyattnError as error:
        print(_message(error, given), file=sys.stderr)
        return 2
    except BrokenPipeError:  # `anyattn … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _message(error: AnyattnError, argv: list[str]) -> str:
    """One line; where the error has no next step, the command's own help is one."""
    text = f"anyattn: {' '.join(str(error).split())}"
    if error.hint is None:
        command = argv[0] if argv and argv[0] in COMMANDS else "COMMAND"
        text += f". Next: `anyattn {command} --help` lists the options"
    return text


class _Parser(argparse.ArgumentParser):
    """Wrong values are errors like all others, not a page of usage."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found as a `ConfigError`."""
        hint = f"`{self.prog} --help` lists the options"
        option, _, what = message.removeprefix("argument ").partition(": ")
        choice = re.fullmatch(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", what)
        if choice:
            raise UnknownNameError(f"value of {option}", choice[1], choice[2].replace("'", "").split(", "))
        value = re.fullmatch(r"invalid (\w+) value: (.*)", what)
        if value:
            allowed = {"int": "a whole number", "float": "a number"}.get(value[1], value[1])
            raise ConfigError(f"value of {option}", asked=value[2], allowed=allowed, hint=hint)
        if option == "the following arguments are required":
            words = [a.metavar or a.dest for a in self._get_positional_actions()]
            usage = " ".join([self.prog, *map(str, words), "[options]"])
            raise ConfigError("an argument is missing", asked=f"nothing for {what}", allowed=usage, hint=hint)
        beside = re.fullmatch(r"not allowed with argument (.*)", what)
        if beside:
            both = f"{option} and {beside[1]}"
            hint = f"leave {option} or {beside[1]} out"
            raise ConfigError("options that exclude each other", asked=both, allowed="one of them", hint=hint)
        if what:
            raise ConfigError(option, asked="nothing" if what.startswith("expected") else what,
                allowed=what.removeprefix("expected "), hint=hint)  # fmt: skip
        raise ConfigError(message, hint=hint)


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
    if argv[0] != "doctor":  # which reports a bad environment instead
        env.check_environment()
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
    parser = _Parser(
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
