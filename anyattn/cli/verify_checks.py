"""Options of `anyattn verify` that can't be, refused before anything is run."""

from __future__ import annotations

import argparse

from anyattn import env
from anyattn.bench.outputs import check_file
from anyattn.errors import ConfigError, UnknownNameError

__all__ = ["check_dense", "check_options"]


def check_options(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for counts below 1, a file that can't be written, a check that nobody knows or
    that only --case has, and for a simulated machine, which runs nothing.
    """
    for name in ("cases", "random", "workers"):
        count = getattr(args, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name}", asked=count, allowed=">= 1", hint=f"leave --{name} out")
    if args.write:
        check_file("--write", args.write)
    _check_check(args)
    if args.emulated:
        return
    if args.assume:
        raise ConfigError(
            "--assume verifies nothing by itself", asked=args.assume, allowed="with --emulated",
            hint="add --emulated, or leave --assume out to verify on this machine",
        )  # fmt: skip
    assumed = env.read("ANYATTN_ASSUME")
    if assumed:
        raise ConfigError(
            "a simulated machine runs nothing", asked=f"ANYATTN_ASSUME={assumed}", allowed="this machine",
            hint=f"unset ANYATTN_ASSUME, or give --emulated --assume {assumed}",
        )  # fmt: skip


def _check_check(args: argparse.Namespace) -> None:
    from anyattn.testing.checks import CHECKS

    if args.check is not None and args.check not in CHECKS:
        raise UnknownNameError("check", args.check, CHECKS)
    if args.check is not None and args.case is None:
        raise ConfigError(
            "--check is for --case", asked=f"--check {args.check}", allowed="--case CASE --check NAME",
            hint="add --case, or leave --check out: a whole run has every check",
        )  # fmt: skip


def check_dense(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for a number of cases that a plan of its own length doesn't heed."""
    if args.cases is not None and (args.random is not None or not args.full):
        raise ConfigError(
            "--cases is for --full, --latent and --graphs", asked=f"--cases {args.cases}",
            allowed="--full --cases N, or --random N", hint="add --full, or leave --cases out",
        )  # fmt: skip
