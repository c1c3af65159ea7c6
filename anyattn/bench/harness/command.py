"""The options that all benchmarks share, and how they end."""

from __future__ import annotations

import argparse

import torch

from anyattn.bench.harness.measure import Settings
from anyattn.bench.harness.report import Report
from anyattn.detect.host import detect_host
from anyattn.errors import ConfigError

__all__ = ["add_arguments", "device_here", "emit", "settings_of"]


def device_here(text: str) -> str:
    """Type of `--device`: a torch device that is here. Its errors say what is, and what to install."""
    try:
        detect_host(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def add_arguments(parser: argparse.ArgumentParser, *, rounds: int = 9) -> None:
    """`--device --rounds --threads --graph --json`."""
    parser.add_argument("--device", type=device_here, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=rounds, help="samples of each candidate")
    parser.add_argument("--threads", type=int, help="torch threads (default: torch's choice)")
    parser.add_argument("--graph", action="store_true", help="time CUDA-graph replays")
    parser.add_argument("--json", metavar="FILE", help="write the report there")


def settings_of(args: argparse.Namespace, *, dtype: torch.dtype = torch.float32) -> Settings:
    """Settings from those options; sets the thread count."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return Settings(rounds=args.rounds, graph=args.graph, limits_dtype=dtype)


def emit(report: Report, args: argparse.Namespace) -> None:
    """Print the table and, if asked for, write the JSON."""
    print(report.table())
    if args.json:
        report.save(args.json)
