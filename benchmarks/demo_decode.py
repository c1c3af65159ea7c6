"""Decode speed of the demo model: this package's engine at batch 1 and 8, transformers (sdpa) at batch 1.

    python -m benchmarks.demo_decode [--json out.json] [--tokens 16] [--dtype float32]

All candidates hold the same weights and continue prompts of the same length; prefill is not timed. Bytes are
the weights, which every step reads once, whatever its batch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from anyattn.bench.harness import Candidate, Report, Work, add_arguments, emit, measure, settings_of
from anyattn.command_line import count, one_line_errors
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.model import LlamaModel
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.tokenizer import Tokenizer
from anyattn.demo.weights import Checkpoint, find_gguf, load_gguf

PROMPT = "It was late in the afternoon when the last boat came back to the harbour, and the wind had turned."


def engine_candidate(model: LlamaModel, ids: Sequence[int], batch: int, tokens: int, work: Work) -> Candidate:
    """`tokens` decode steps of `batch` requests that were prefilled untimed."""
    config = EngineConfig(max_batch=batch, max_context=len(ids) + tokens + 1, prefix_reuse=False)
    engine = Engine(model, config)
    params = SamplingParams(max_new_tokens=tokens + 1, ignore_eos=True)

    def setup() -> None:
        for _ in range(batch):
            engine.add(ids, params)
        while any(r.prefilling for r in [*engine.scheduler.running, *engine.scheduler.waiting]):
            engine.step()

    def run() -> None:
        for _ in range(tokens):
            engine.step()

    return Candidate(f"anyattn, batch {batch}", [run], work, setup)


def transformers_candidate(
    ids: Sequence[int], tokens: int, work: Work, dtype: torch.dtype, device: str
) -> Candidate:
    """`tokens` greedy steps of transformers' own model and cache."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    path = find_gguf()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=dtype, attn_implementation="sdpa"
    )
    model.to(device)
    prompt = torch.tensor([list(ids)], device=device)
    cache: Any = None
    token = prompt

    @torch.inference_mode()
    def step() -> None:
        nonlocal cache, token
        output = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, token = output.past_key_values, output.logits[:, -1:].argmax(-1)

    def setup() -> None:
        nonlocal cache, token
        cache, token = None, prompt
        step()

    def run() -> None:
        for _ in range(tokens):
            step()

    return Candidate("transformers sdpa, batch 1", [run], work, setup)


def verdict(report: Report, batch: int) -> str:
    """The two ratios that matter, with their quartiles over the rounds."""
    one, many = "anyattn, batch 1", f"anyattn, batch {batch}"
    lines = []
    if "transformers sdpa, batch 1" in {r.name for r in report.results}:
        r = report.ratio("transformers sdpa, batch 1", one)
        lines.append(f"batch 1 is {r.median:.2f} x transformers ({r.low:.2f} to {r.high:.2f})")
    r = report.ratio(one, many)
    low, high = batch * r.low, batch * r.high
    lines.append(f"batch {batch} is {batch * r.median:.2f} x batch 1 in tokens/s ({low:.2f} to {high:.2f})")
    return "\n".join(lines)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tokens", type=count, default=16, help="decode steps of a sample")
    parser.add_argument("--batch", type=count, default=8, help="the larger batch")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--no-transformers", action="store_true", help="only this package")
    return parser.parse_args(argv)


def candidates(args: argparse.Namespace, checkpoint: Checkpoint) -> list[Candidate]:
    """Engine at batch 1 and at the larger batch, and transformers."""
    dtype: torch.dtype = getattr(torch, args.dtype)
    model = LlamaModel(checkpoint, dtype=dtype, device=args.device)
    ids = Tokenizer(checkpoint.metadata).encode(PROMPT)
    weights = sum(t.numel() for t in checkpoint.tensors.values()) * dtype.itemsize * args.tokens

    def work(batch: int) -> Work:
        return Work(bytes=weights, items=batch * args.tokens, item="tokens")

    makers: list[Callable[[], Candidate]] = [
        lambda: engine_candidate(model, ids, 1, args.tokens, work(1)),
        lambda: engine_candidate(model, ids, args.batch, args.tokens, work(args.batch)),
    ]
    if not args.no_transformers:
        makers.append(lambda: transformers_candidate(ids, args.tokens, work(1), dtype, args.device))
    return [make() for make in makers]


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. 2 for what can't be run."""
    args = arguments(argv)
    settings = settings_of(args, dtype=getattr(torch, args.dtype))
    found = candidates(args, load_gguf(find_gguf()))
    report = measure(f"SmolLM2-135M decode, {args.dtype}", found, args.device, settings)
    emit(report, args)
    print(verdict(report, args.batch))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
