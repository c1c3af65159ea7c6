"""The options that all benchmarks share, and how they end."""

from __future__ import annotations

import argparse

import torch

from anyattn.bench.harness.measure import Settings
from anyattn.bench.harness.report import Report
from anyattn.bench.outputs import check_file
from anyattn.command_line import argument, at_least, count
from anyattn.detect.host import detect_host
from anyattn.errors import ConfigError

__all__ = ["add_arguments", "device_here", "emit", "output_file", "settings_of"]


@argument
def device_here(text: str) -> str:
    """Type of `--device`: a torch device that is here. Its errors say what is, and what to install."""
    detect_host(text)
    return text


@argument
def output_file(text: str) -> str:
    """Type of an option that names a file to write, refused before anything runs if none can be there."""
    check_file("the file", text)
    return text


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 9) -> None:
    """`--device --rounds --threads --graph --json`."""
    parser.add_argument("--device", type=device_here, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=at_least(2), default=rounds, help="samples of each candidate")
    parser.add_argument("--threads", type=count, help="torch threads (default: torch's choice)")
    parser.add_argument("--graph", action="store_true", help="time CUDA-graph replays")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the report there")


def settings_of(args: argparse.Namespace, *, dtype: torch.dtype = torch.float32) -> Settings:
    """Settings from those options; sets the thread count.

    Raises:
        ConfigError: graphs on a device that has none.
    """
    if args.graph and args.device.partition(":")[0] != "cuda":
        raise ConfigError("--graph", asked=args.device, allowed="cuda", hint="leave --graph out")
    if args.threads:
        torch.set_num_threads(args.threads)
    return Settings(rounds=args.rounds, graph=args.graph, limits_dtype=dtype)


def emit(report: Report, args: argparse.Namespace) -> None:
    """Print the table and, if asked for, write the JSON."""
    print(report.table())
    if args.json:
        report.save(args.json)
