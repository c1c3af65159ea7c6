"""Options of `anyattn verify` that can't be, refused before anything is run."""

from __future__ import annotations

import argparse

from anyattn import env
from anyattn.errors import ConfigError

__all__ = ["check_dense", "check_options"]


def check_options(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for counts below 1, and for a simulated machine, which runs nothing."""
    for name in ("cases", "random"):
        count = getattr(args, name)
        if count is not None and count < 1:
            raise ConfigError(f"--{name}", asked=count, allowed=">= 1", hint=f"leave --{name} out")
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


def check_dense(args: argparse.Namespace) -> None:
    """Raises `ConfigError` for a number of cases that a plan of its own length doesn't heed."""
    if args.cases is not None and (args.random is not None or not args.full):
        raise ConfigError(
            "--cases is for --full, --latent and --graphs", asked=f"--cases {args.cases}",
            allowed="--full --cases N, or --random N", hint="add --full, or leave --cases out",
        )  # fmt: skip
