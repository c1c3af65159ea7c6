"""Text from a small real model (SmolLM2-135M-Instruct) through the backends that fit this machine.

anyattn generate --demo
anyattn generate --prompt "The capital of France is" --max-new-tokens 20
anyattn generate --prompts prompts.txt --backend torch_native --page-size 16 --chunk 64 --json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyattn.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    import torch

    from anyattn.demo.engine import Engine, EngineConfig
    from anyattn.demo.sampler import SamplingParams
    from anyattn.demo.session import Answer, Session

__all__ = ["add_arguments", "read_prompts", "run"]

_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `anyattn generate`."""
    what = parser.add_argument_group("what to say")
    what.add_argument("--demo", action="store_true", help="four built-in prompts, the decision and the speed")
    what.add_argument("--prompts", metavar="FILE", help="one prompt a line, or a JSON list of strings")
    what.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may be given repeatedly")
    what.add_argument("--chat", action="store_true", help="wrap each prompt in the model's chat template")
    how = parser.add_argument_group("sampling")
    how.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    how.add_argument("--greedy", action="store_true", help="always the best token (the default)")
    how.add_argument("--temperature", type=float, metavar="T", help="sample instead")
    how.add_argument("--top-p", type=float, metavar="P", help="only from the likeliest tokens (default 1)")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="prompt i draws from seed N + i")
    where = parser.add_argument_group("attention (explicit choices are honoured or refused)")
    where.add_argument("--device", help="torch device (default: an accelerator if torch has one)")
    where.add_argument("--dtype", help=f"{', '.join(_DTYPES)} (default: float32 on the CPU, else bfloat16)")
    where.add_argument("--backend", metavar="NAME", help="for prefill and decode")
    where.add_argument("--prefill", metavar="NAME", help="for prefill")
    where.add_argument("--decode", metavar="NAME", help="for decode")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--page-size", type=int, metavar="P", help="tokens in a KV page (default: chosen)")
    engine.add_argument("--chunk", type=int, metavar="N", help="most prefill tokens of a step (default: all)")
    engine.add_argument("--max-batch", type=int, default=8, metavar="N", help="requests that run at once")
    engine.add_argument("--kv-tokens", type=int, metavar="N", help="size of the KV pool (default: what fits)")
    engine.add_argument("--speculate", metavar="HOW", help="draft and verify trees: ngram (prompt look-up)")
    engine.add_argument(
        "--draft-tokens", type=int, metavar="N", help="tokens verified per request and step (default 8)"
    )
    engine.add_argument(
        "--graphs",
        default="auto",
        metavar="HOW",
        help="decode in graphs: auto (on CUDA, the default), on, off",
    )
    engine.add_argument("--no-prefix-reuse", action="store_true", help="compute shared prefixes every time")


def run(args: argparse.Namespace) -> int:
    """Generate and print. Errors are raised: the caller shows them."""
    prompts, params, config = _prompts(args), _params(args), _config(args)

    from anyattn.demo.session import Session
    from anyattn.demo.showcase import FirstText, before

    device = _device(args.device)
    session = Session(dtype=_dtype(args.dtype, device), device=device)

    def on_ready(engine: Engine) -> None:
        if args.demo and not args.json:
            print("\n".join(before(engine, session)), flush=True)

    first = FirstText(prompts[0])
    growing = args.demo and not args.json and not sys.stderr.isatty()  # where the bar shows nothing
    answers = session.complete(
        prompts,
        params,
        config,
        chat=args.chat,
        progress=not args.json,
        on_ready=on_ready,
        on_text=first if growing else None,
    )
    if first.printed:
        print()
    speculation = None
    if config.draft_tokens and args.demo:
        from anyattn.demo.speculation_report import beside_plain

        speculation = beside_plain(session, answers, params, config, chat=args.chat)
    _print(args, session, answers, shown=1 if first.printed else 0, speculation=speculation)
    return 0


def read_prompts(path: str) -> list[str]:
    """Prompts of a file: a JSON list of strings, or else its non-empty lines.

    Raises:
        ConfigError: an unreadable file, or a JSON list of something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no UTF-8 text ({error.reason})"
        raise ConfigError(
            f"the file with prompts can't be read: {reason}",
            asked=path,
            allowed="a text file, or a JSON list of strings",
            hint="check the path and the encoding (UTF-8)",
        ) from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not text.lstrip().startswith("["):
        return lines
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if not re.match(r'\s*\[\s*"', text):
            return lines  # lines that happen to start with a bracket
        raise ConfigError(
            f"broken JSON in the file with prompts: {error}",
            asked=path,
            allowed="a list of strings",
            hint="repair the list, or write one prompt a line",
        ) from error
    if not isinstance(found, list) or not all(isinstance(p, str) for p in found):
        raise ConfigError(
            "prompts in JSON", asked=path, allowed="a list of strings", hint="or write one prompt a line"
        )
    return found


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = [*(read_prompts(args.prompts) if args.prompts else []), *args.prompt]
    if args.demo:
        if prompts:
            raise ConfigError(
                "--demo brings its own prompts",
                asked="--demo with --prompts or --prompt",
                allowed="one of them",
                hint="leave --prompts and --prompt out",
            )
        from anyattn.demo.showcase import PROMPTS

        return list(PROMPTS)
    if not prompts:
        raise ConfigError(
            "no prompts",
            asked=f"{args.prompts}: empty" if args.prompts else "nothing",
            allowed="at least one prompt",
            hint="give --prompt TEXT, --prompts FILE or --demo",
        )
    if not all(prompts):
        raise ConfigError(
            "a prompt without text", asked="''", allowed="at least one character", hint="leave it out"
        )
    return prompts


def _params(args: argparse.Namespace) -> SamplingParams:
    from anyattn.demo.sampler import SamplingParams

    sampled = args.temperature is not None or args.top_p is not None
    if args.greedy and sampled:
        raise ConfigError(
            "--greedy takes no --temperature and no --top-p",
            asked="both",
            allowed="greedy or sampled",
            hint="leave one of them out",
        )
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=(1.0 if args.temperature is None else args.temperature) if sampled else 0.0,
        top_p=1.0 if args.top_p is None else args.top_p,
        seed=args.seed,
    )


def _config(args: argparse.Namespace) -> EngineConfig:
    from anyattn.demo.engine import EngineConfig

    chunk = 64 if args.demo and args.chunk is None else args.chunk
    return EngineConfig(
        max_batch=args.max_batch,
        max_context=None,
        chunk=chunk,
        kv_tokens=args.kv_tokens,
        page_size=args.page_size,
        backend=args.backend,
        prefill=args.prefill,
        decode=args.decode,
        prefix_reuse=not args.no_prefix_reuse,
        draft_tokens=_draft_tokens(args),
        graphs=_graphs(args.graphs),
    )


def _graphs(choice: str) -> str:
    """One of the known uses of graphs, before the model is loaded."""
    from anyattn.demo.graphs import CHOICES

    if choice not in CHOICES:
        raise UnknownNameError("use of graphs", choice, CHOICES)
    return choice


def _draft_tokens(args: argparse.Namespace) -> int:
    """0 without `--speculate`."""
    from anyattn.demo.speculative import DRAFTERS

    if args.speculate is None:
        if args.draft_tokens is not None:
            raise ConfigError(
                "--draft-tokens without drafts",
                asked=args.draft_tokens,
                allowed="--speculate ngram --draft-tokens N",
                hint="add --speculate ngram",
            )
        return 0
    if args.speculate not in DRAFTERS:
        raise UnknownNameError("way to draft", args.speculate, DRAFTERS)
    return 8 if args.draft_tokens is None else max(1, args.draft_tokens)


def _device(name: str | None) -> str:
    """The device asked for, once it was found to be there; else an accelerator, else the CPU."""
    import torch

    from anyattn.detect import detect_machine

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        detect_machine(name)  # knows what is here and what to install
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"this torch has no such device: {reason}",
            asked=name,
            allowed="a device that `anyattn doctor` lists",
            hint="use --device cpu",
        ) from error
    return name


def _dtype(name: str | None, device: str) -> torch.dtype:
    import torch

    if name is None:
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    if name not in _DTYPES:
        raise UnknownNameError("dtype of the demo model", name, _DTYPES)
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _print(
    args: argparse.Namespace,
    session: Session,
    answers: Sequence[Answer],
    *,
    shown: int,
    speculation: dict[str, Any] | None,
) -> None:
    from anyattn.demo.showcase import after, statistics

    assert session.engine is not None
    records = [answer.to_json() for answer in answers]
    if args.json and args.demo:
        decision = session.engine.decision.to_json()
        found = statistics(session.engine, answers)
        if speculation is not None:
            found["speculation"] = speculation
        print(json.dumps({"decision": decision, "answers": records, "statistics": found}, ensure_ascii=False))
    elif args.json:
        print(json.dumps(records, indent=2, ensure_ascii=False))
    elif args.demo:
        print("\n".join(after(answers, session, shown=shown)))
        if speculation is not None:
            from anyattn.demo.speculation_report import lines

            print("\n".join(lines(speculation)))
    else:
        print("\n\n".join(f"{answer.prompt}{answer.text}" for answer in answers))
