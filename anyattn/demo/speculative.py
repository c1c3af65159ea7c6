"""The engine with prompt look-up drafts: each decode step verifies a tree of guesses per request.

A step computes the last token and the drafts of every request at once (TARGET_VERIFY, ragged, a QLEN_ONLY
mask written in place), follows the model's own choices down the tree, and moves the KV of what was accepted
to where it belongs. The text is that of plain decoding; only its speed differs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import anyattn
from anyattn.core.batch import ForwardMode
from anyattn.core.graph.objects import GraphPlatform
from anyattn.core.kv.allocator import pages_for
from anyattn.core.speculative.accept import accept
from anyattn.core.speculative.ragged import RaggedTrees
from anyattn.core.speculative.tree import TreeBuilder
from anyattn.demo.decoder import Decoder
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.ngram import NgramDrafter
from anyattn.demo.request import Chunk, GenerationRequest
from anyattn.demo.sampler import sample
from anyattn.demo.scheduler import Step
from anyattn.errors import ConfigError

__all__ = ["DRAFTERS", "SpeculationStats", "SpeculativeEngine", "make_engine"]

DRAFTERS = ("ngram",)
"""Names that `--speculate` takes."""


@dataclass
class SpeculationStats:
    """Verify steps so far: requests in them, drafts verified and accepted, tokens that came out, seconds."""

    steps: int = 0
    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def acceptance(self) -> float:
        """Accepted drafts of those verified."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_row(self) -> float:
        """Tokens that a request got from a verify step; plain decoding gives one."""
        return self.tokens / self.rows if self.rows else 0.0


class SpeculativeEngine(Engine):
    """An `Engine` whose decode steps verify drafts of at most `config.draft_tokens` nodes a request.

    Attributes:
        drafter: where drafts come from. speculation: what became of them.

    Raises:
        ConfigError: fewer than two draft tokens (the last token is one of them), or a dual pool.
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        *,
        eos_id: int | None = None,
        platform: GraphPlatform | None = None,
    ) -> None:
        if config.draft_tokens < 2:
            raise ConfigError(
                "draft tokens of a step, the last token included",
                asked=config.draft_tokens,
                allowed=">= 2",
                hint="8 is a good start",
            )
        if config.dual_pool:
            raise ConfigError(
                "drafts with a dual pool",
                asked="dual_pool=True",
                allowed="one of the two",
                hint="EngineConfig(dual_pool=False), or draft_tokens=0",
            )
        super().__init__(model, config, eos_id=eos_id, platform=platform)
        if self.graphs is not None:
            self.graphs_note += "; verify steps run eagerly, their trees differ in size"
        self.drafter = NgramDrafter()
        self.speculation = SpeculationStats()
        self._mask = anyattn.VerifyMask.allocate(
            anyattn.TreeMaskMode.QLEN_ONLY,
            max_requests=config.max_batch,
            draft_tokens=config.draft_tokens,
            device=self.pool.device,
        )

    def step(self) -> tuple[Step, list[GenerationRequest]]:
        """As `Engine.step`; a decode step verifies drafts where there are any."""
        started = time.perf_counter()
        step = self.scheduler.schedule()
        if step.mode is not ForwardMode.DECODE:
            return self._run(step, started)
        drafts = [self._draft(chunk.request) for chunk in step.decodes]
        if all(draft.tree.num_nodes == 1 for draft in drafts):
            return self._run(step, started)
        wide = [
            Chunk(c.request, c.start, len(d.tokens), True) for c, d in zip(step.decodes, drafts, strict=True)
        ]
        self._list_pages(wide)
        logits = self._verify(wide, drafts)
        done, sampled = self._accept(wide, drafts, logits)
        finished = self.scheduler.finish_step(done, sampled)
        seconds = time.perf_counter() - started
        self.stats.book(ForwardMode.TARGET_VERIFY, sum(c.length for c in wide), seconds)
        self.speculation.steps += 1
        self.speculation.seconds += seconds
        return done, finished

    def _draft(self, request: GenerationRequest) -> TreeBuilder:
        """A tree within what the answer may still need and what pages are free; its pages are allocated."""
        page, cache = self.pool.page_size, self.cache
        spare = max(0, cache.num_available - len(self.scheduler.running))
        room = (len(request.pages) + spare) * page - request.computed
        wanted = request.params.max_new_tokens - request.num_new - 1
        draft = self.drafter.draft(request.tokens, min(self.config.draft_tokens, room), wanted)
        missing = pages_for(request.computed + len(draft.tokens), page) - len(request.pages)
        request.pages += cache.allocate(max(missing, 0))
        return draft

    def _verify(self, wide: Sequence[Chunk], drafts: Sequence[TreeBuilder]) -> torch.Tensor:
        """Logits `[T, vocab]` behind every node."""
        trees = RaggedTrees(tuple(d.tree for d in drafts))
        slots = [slot for chunk in wide for slot in chunk.slots(self.pool.page_size)]
        batch = trees.batch([c.request.row for c in wide], [c.start for c in wide], slots, mask=self._mask)
        plan = self.backend.init_forward_metadata(batch)
        ids = torch.tensor([token for draft in drafts for token in draft.tokens], dtype=torch.int64)
        device = self.model.device
        with anyattn.forward_context(self.backend, plan):
            return self.model.forward(
                ids.to(device, non_blocking=True),
                plan.positions,
                batch,
                torch.arange(len(ids), device=device),
            )

    def _accept(
        self, wide: Sequence[Chunk], drafts: Sequence[TreeBuilder], logits: torch.Tensor
    ) -> tuple[Step, dict[GenerationRequest, int]]:
        """Tokens that each request gets: all but the last are appended here, their KV in place."""
        best = logits.argmax(-1).tolist()
        done, sampled, first = [], {}, 0
        moved: tuple[list[int], list[int]] = ([], [])
        for chunk, draft in zip(wide, drafts, strict=True):
            request, start = chunk.request, first

            def choose(node: int, request: GenerationRequest = request, start: int = start) -> int:
                if request.params.greedy:
                    return int(best[start + node])
                row = logits[start + node : start + node + 1]
                return sample(row, [request.params], [request.generator])[0]

            found = accept(draft.tree, draft.tokens, choose)
            tokens = self._cut(request, found.tokens)
            slots = chunk.slots(self.pool.page_size)
            for place, node in enumerate(found.path[: len(tokens)]):
                if place != node:
                    moved[0].append(slots[node])
                    moved[1].append(slots[place])
            request.tokens += tokens[:-1]
            sampled[request] = tokens[-1]
            done.append(Chunk(request, chunk.start, len(tokens), True))
            self._book(draft, len(tokens), len(found.path) - 1)
            first += chunk.length
        if moved[0]:
            source, target = (torch.tensor(slots).to(self.pool.device) for slots in moved)
            self.pool.move(source, target)
        return Step(decodes=done), sampled

    def _cut(self, request: GenerationRequest, tokens: Sequence[int]) -> list[int]:
        """The tokens up to the one that ends the answer."""
        kept = list(tokens)
        if self.scheduler.eos_id in kept and not request.params.ignore_eos:
            kept = kept[: kept.index(self.scheduler.eos_id) + 1]
        return kept

    def _book(self, draft: TreeBuilder, tokens: int, accepted: int) -> None:
        self.speculation.rows += 1
        self.speculation.drafted += len(draft.tokens) - 1
        self.speculation.accepted += accepted
        self.speculation.tokens += tokens


def make_engine(
    model: Decoder,
    config: EngineConfig,
    *,
    eos_id: int | None = None,
    platform: GraphPlatform | None = None,
) -> Engine:
    """The engine that `config` asks for: with drafts where `draft_tokens` isn't 0."""
    kind = SpeculativeEngine if config.draft_tokens else Engine
    return kind(model, config, eos_id=eos_id, platform=platform)
