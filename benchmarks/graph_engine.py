"""The demo model under graphs against the same steps run eagerly, while requests join and leave.

    python -m benchmarks.graph_engine --backend triton --json out.json
    TRITON_INTERPRET=1 python -m benchmarks.graph_engine --backend triton --device cpu --layers 1 \\
        --requests 3 --tokens 3                                                         # smoke test

Every decode step is computed three times, from the same KV and the same tokens:

graph   the replay, first; its tokens are the ones that are kept
again   the captured plan and body run eagerly: bit for bit, where the backend is run-to-run deterministic
fresh   the batch padded to the same bucket, planned anew and run eagerly: bit for bit where bounds of lengths
        are all that the backend plans from; else (FlashInfer cuts keys otherwise in a graph) equal tokens,
        up to ties

Then the requests run under graphs alone (its text must be that of the first run) and eagerly at their own
batch sizes, for the speed of both. Exit code 1 if something differs, 2 if nothing was captured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import anyattn
from anyattn.bench.harness.command import device_here, output_file
from anyattn.bench.harness.report import device_name, versions
from anyattn.command_line import count, one_line_errors
from anyattn.core.batch import ForwardBatch, ForwardMode, UpperBound
from anyattn.core.context import forward_context
from anyattn.core.graph.objects import GraphPlatform
from anyattn.core.traits import Determinism, HostLengthNeed
from anyattn.demo.decoder import Decoder
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.graphs import DecodeGraphs
from anyattn.demo.model import LlamaModel
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.tokenizer import Tokenizer
from anyattn.demo.weights import find_gguf, load_gguf
from benchmarks.direct.command import offer_interpreter
from benchmarks.direct.graphed import graphs_of

__all__ = ["Checked", "Comparison", "Difference", "compare", "main", "run_requests"]

TIE = 0.5
"""Logits of bfloat16 models lie 0.125 apart at 16 to 32: tokens nearer than this are a tie."""
_TEXT = (
    "It was late in the afternoon when the last boat came back to the harbour. The wind had turned, and the "
    "old man on the pier counted the lamps one by one: the baker, the school, the house of the two sisters. "
    "Nobody had seen the stranger leave. What he wrote that night, in a hand that hardly anybody could read, "
)


@dataclass
class Difference:
    """Of one eager run from the graph's: rows whose bits differ, tokens that differ, and by how much.

    `worst`: largest difference of a logit. `gap`: how far the graph's token was from the eager best one.
    """

    rows: int = 0
    tokens: int = 0
    worst: float = 0.0
    gap: float = 0.0

    def add(self, graph: torch.Tensor, eager: torch.Tensor) -> None:
        """Logits `[B, vocab]` of one step."""
        self.rows += int((graph != eager).any(-1).sum())
        chosen, best = graph.argmax(-1), eager.argmax(-1)
        self.tokens += int((chosen != best).sum())
        self.worst = max(self.worst, float((graph - eager).abs().max()))
        behind = eager.amax(-1) - eager.gather(-1, chosen[:, None])[:, 0]
        self.gap = max(self.gap, float(behind.max()))

    def __str__(self) -> str:
        return (
            f"{self.rows} rows differ, {self.tokens} tokens; largest difference of a logit {self.worst:.3g}, "
            f"of a token's from the best {self.gap:.3g}"
        )


class Checked(DecodeGraphs):
    """Graphs whose every step is computed again, eagerly, and compared."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        """Takes the place of `graphs`."""
        self._graphs, self.runner = graphs, graphs.runner
        self.again, self.fresh = Difference(), Difference()
        self.tokens, self.steps = 0, 0
        self.used: set[int] = set()

    def logits(self, batch: ForwardBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """Those of the graph."""
        logits = self._graphs.logits(batch, token_ids).clone()
        rows = batch.batch_size
        self.again.add(logits, self._again(batch)[:rows])
        self.fresh.add(logits, self._fresh(batch, token_ids)[:rows])
        self.tokens += rows
        self.steps += 1
        self.used.add(self.runner.entry(batch).key.num_requests)
        return logits

    def _again(self, batch: ForwardBatch) -> torch.Tensor:
        """The body, on the plan that the replay has just used."""
        entry, backend = self.runner.entry(batch), self.runner.backend
        backend.init_forward_metadata_in_graph(entry.plan)
        with forward_context(backend, entry.plan):
            return self._graphs.body(entry.plan.batch, **entry.inputs)

    def _fresh(self, batch: ForwardBatch, token_ids: torch.Tensor) -> torch.Tensor:
        """The body on a plan and ids of its own, for the padded batch; bounds as a capture has them."""
        entry, backend = self.runner.entry(batch), self.runner.backend
        padded = entry.padder.pad(batch, entry.plan)
        if bounds_suffice(backend):
            padded = padded.view(host_lens=UpperBound(backend.table.max_context, 1))
        ids = torch.zeros_like(entry.inputs["token_ids"])
        ids[: batch.batch_size].copy_(token_ids)
        with forward_context(backend, backend.init_forward_metadata(padded)):
            return self._graphs.body(padded, ids)


def bounds_suffice(backend: Any) -> bool:
    """True if nothing of a decode step's plan follows from exact lengths."""
    need: HostLengthNeed = backend.traits(ForwardMode.DECODE).host_lengths
    return need is not HostLengthNeed.EXACT


@dataclass(frozen=True)
class Comparison:
    """What was found. `memory`: bytes on the device by bucket, in the order of capture.

    Attributes:
        exact: the backend is run-to-run deterministic. bounded: it plans from bounds alone.
        again, fresh: eager runs of the same padded steps. repeated: requests whose text is the same in a
            second run under graphs. same_as_eager: and in an eager run of unpadded steps, whose products
            round otherwise; for information.
    """

    backend: str
    exact: bool
    bounded: bool
    tokens: int
    steps: int
    used: list[int]
    again: Difference
    fresh: Difference
    requests: int
    repeated: int
    same_as_eager: int
    memory: list[tuple[int, int]]
    graph_tokens_per_s: float
    eager_tokens_per_s: float
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.exact and self.again.rows:
            self.faults.append(f"{self.again.rows} rows aren't those of the same plan run eagerly")
        if self.exact and self.bounded and self.fresh.rows:
            self.faults.append(f"{self.fresh.rows} rows aren't those of a plan made anew")
        if max(self.again.gap, self.fresh.gap) > TIE:
            self.faults.append(
                f"other tokens than eager steps, {max(self.again.gap, self.fresh.gap):.2f} apart"
            )
        if self.exact and self.repeated != self.requests:
            self.faults.append(f"{self.requests - self.repeated} texts differ in a second run under graphs")
        if not self.tokens:
            self.faults.append("no step ran in a graph")

    @property
    def ok(self) -> bool:
        """Nothing differs that may not."""
        return not self.faults

    @property
    def same_text(self) -> bool:
        """All texts are those of the unpadded eager run."""
        return self.same_as_eager == self.requests

    def lines(self) -> list[str]:
        """For a reader."""
        rows = [f"  {size:>4} requests  {nbytes / 1e6:9.2f} MB" for size, nbytes in self.memory]
        total = sum(nbytes for _, nbytes in self.memory)
        return [
            f"{self.backend}: {self.tokens} tokens of {self.steps} steps, buckets used {self.used}",
            f"same plan, eager: {self.again}",
            f"new plan, eager:  {self.fresh}",
            f"texts: {self.repeated} of {self.requests} again in a second run under graphs, "
            f"{self.same_as_eager} in an eager run of unpadded steps",
            f"decode: {self.graph_tokens_per_s:.0f} tokens/s under graphs, "
            f"{self.eager_tokens_per_s:.0f} eager",
            "graph memory by bucket, in the order of capture:",
            *rows,
            f"   all           {total / 1e6:9.2f} MB",
            "; ".join(self.faults) or "ok",
        ]


def run_requests(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], every: int
) -> list[tuple[int, ...]]:
    """New tokens of each request. One joins every `every` steps, and leaves when it has its tokens."""
    waiting, requests, step = list(zip(prompts, params, strict=True)), [], 0
    while waiting or engine.scheduler.busy:
        if waiting and (step % every == 0 or not engine.scheduler.busy):
            requests.append(engine.add(*waiting.pop(0)))
        engine.step()
        step += 1
    return [request.completion().ids for request in requests]


def _speed(engine: Engine) -> float:
    return engine.stats.of(ForwardMode.DECODE).tokens_per_second


def compare(
    model: Decoder,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    every: int = 2,
    platform: GraphPlatform | None = None,
) -> Comparison:
    """Run the requests three times: checked under graphs, under graphs, eagerly.

    Raises:
        GraphError: the backend or the device has no graphs. SelectionError: it doesn't serve the model.
    """
    config = replace(config, graphs="on")
    engine = Engine(model, config, platform=platform)
    assert engine.graphs is not None
    checked = Checked(engine.graphs)
    engine.graphs = checked
    texts = run_requests(engine, prompts, params, every)
    engine.graphs = checked._graphs
    again = Engine(model, config, platform=platform)
    second = run_requests(again, prompts, params, every)
    eager = Engine(model, replace(config, graphs="off"))
    plain = run_requests(eager, prompts, params, every)
    traits = engine.backend.traits(ForwardMode.DECODE)
    return Comparison(
        backend=engine.decision.decode.backend,
        exact=traits.determinism >= Determinism.RUN_TO_RUN,
        bounded=bounds_suffice(engine.backend),
        tokens=checked.tokens,
        steps=checked.steps,
        used=sorted(checked.used),
        again=checked.again,
        fresh=checked.fresh,
        requests=len(texts),
        repeated=sum(a == b for a, b in zip(texts, second, strict=True)),
        same_as_eager=sum(a == b for a, b in zip(texts, plain, strict=True)),
        memory=[(key.num_requests, nbytes) for key, nbytes in checked.runner.memory()],
        graph_tokens_per_s=_speed(again),
        eager_tokens_per_s=_speed(eager),
    )


def _prompts(tokenizer: Tokenizer, requests: int) -> list[list[int]]:
    """Of different lengths, each beginning with another word."""
    ids = tokenizer.encode(_TEXT)
    turned = [ids[7 * i % len(ids) :] + ids[: 7 * i % len(ids)] for i in range(requests)]
    return [row[: 8 + 5 * i % (len(ids) - 8)] for i, row in enumerate(turned)]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", required=True, help="for prefill and decode")
    parser.add_argument("--prefill", help="another one for prefill")
    parser.add_argument("--requests", type=count, default=64)
    parser.add_argument("--tokens", type=count, default=256, help="new tokens of each request")
    parser.add_argument("--every", type=count, default=3, help="a request joins every so many steps")
    parser.add_argument("--max-batch", type=count, default=48, help="requests that run at once")
    parser.add_argument("--layers", type=count, help="only the first layers of the model, for smoke tests")
    parser.add_argument("--device", type=device_here, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there, too")
    return parser.parse_args(argv)


def _model(args: argparse.Namespace, device: torch.device) -> tuple[LlamaModel, Tokenizer]:
    checkpoint = load_gguf(find_gguf())
    tokenizer = Tokenizer(checkpoint.metadata)
    if args.layers:
        checkpoint = replace(checkpoint, config=replace(checkpoint.config, num_layers=args.layers))
    name = args.dtype or ("float32" if device.type == "cpu" else "bfloat16")
    with torch.backends.mkldnn.flags(enabled=False):  # the recorder can't hold packed weights
        return LlamaModel(checkpoint, dtype=getattr(torch, name), device=device), tokenizer


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """0 if nothing differs that may not, 1 if something does, 2 without graphs."""
    args = _arguments(argv)
    device = torch.device(args.device)
    offer_interpreter(device)
    model, tokenizer = _model(args, device)
    prompts = _prompts(tokenizer, args.requests)
    context = max(map(len, prompts)) + args.tokens
    config = EngineConfig(
        max_batch=min(args.max_batch, args.requests), max_context=context, chunk=512, prefix_reuse=False,
        **({"prefill": args.prefill, "decode": args.backend} if args.prefill else {"backend": args.backend}),
    )  # fmt: skip
    params = [SamplingParams(max_new_tokens=args.tokens, ignore_eos=True)] * args.requests
    try:
        found = compare(model, config, prompts, params, every=args.every, platform=graphs_of(device))
    except anyattn.AnyattnError as error:
        print(f"{args.backend} has no graphs here: {error}", file=sys.stderr)
        return 2
    record = {
        "device": device_name(device),
        "versions": versions(),
        "model": f"SmolLM2-135M-Instruct, {len(model.specs)} layers, {model.dtype}",
        "new_tokens": args.tokens,
        **asdict(found),
        "ok": found.ok,
    }
    print("\n".join(found.lines()))
    print(json.dumps(record))
    if args.json:
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())
