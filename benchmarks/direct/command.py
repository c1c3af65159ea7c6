"""Options that the benchmarks of this folder share."""

from __future__ import annotations

import argparse
import os

import torch

from anyattn.bench.harness.command import device_here, output_file
from anyattn.command_line import argument, at_least, count
from anyattn.errors import ConfigError, UnknownNameError
from benchmarks.direct import RECIPES
from benchmarks.direct.stage import Shape

__all__ = ["add_shape", "offer_interpreter", "shape_of"]


@argument
def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in RECIPES:
            raise UnknownNameError("backend with a recipe", name, RECIPES)
    if not names:
        raise ConfigError("no backend", asked=repr(text), allowed=", ".join(RECIPES), hint="name one or more")
    return names


def add_shape(parser: argparse.ArgumentParser, *, requests: int | None, length: int, layers: int) -> None:
    """`--backends --device --json --mla --length --layers`, and `--requests` where there is a default."""
    parser.add_argument("--backends", type=_names, default=["triton"], help="of " + ", ".join(RECIPES))
    parser.add_argument("--device", type=device_here, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there")
    parser.add_argument("--mla", action="store_true", help="latent layers of 128 heads (DeepSeek's shape)")
    parser.add_argument(
        "--length", type=at_least(min(1, length)), default=length, help=f"KV tokens of a request ({length})"
    )
    parser.add_argument("--layers", type=count, default=layers, help=f"layers ({layers})")
    if requests is not None:
        parser.add_argument("--requests", type=count, default=requests, help=f"requests ({requests})")


def shape_of(args: argparse.Namespace, requests: int | None = None) -> Shape:
    """The shape that the options describe; bfloat16 on a GPU, float32 elsewhere."""
    return Shape(
        requests=args.requests if requests is None else requests,
        length=args.length,
        layers=args.layers,
        num_q=128 if args.mla else 32,
        mla=args.mla,
        dtype=torch.bfloat16 if args.device.startswith("cuda") else torch.float32,
    )


def offer_interpreter(device: torch.device) -> None:
    """On a CPU with TRITON_INTERPRET=1, `triton` runs in the interpreter: a smoke test, no measurement."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        from anyattn.testing.interpreter import offer_triton

        offer_triton()
