"""Random trees and what verification of them should give, for the tests of this folder."""

from __future__ import annotations

import random

import torch

import anyattn
from anyattn.core.speculative.ragged import RaggedTrees
from anyattn.core.speculative.tree import Tree
from anyattn.testing import oracle
from anyattn.testing.cases import Case
from anyattn.testing.world import World


def random_tree(rng: random.Random, nodes: int) -> Tree:
    """Any tree of that many nodes, node 0 on the prefix; sometimes a chain."""
    if rng.random() < 0.2:
        return Tree.chain(nodes)
    return Tree((-1, *(rng.randrange(-1 if rng.random() < 0.1 else 0, i) for i in range(1, nodes))))


class VerifyWorld:
    """A backend with prefixes in its pool, and trees to verify on top of them."""

    def __init__(
        self, seed: int, *, uniform: bool = False, backend: str = "torch_native", **case: object
    ) -> None:
        rng = random.Random(seed)
        count = rng.randint(1, 4)
        nodes = [rng.randint(1, 8) for _ in range(count)]
        self.trees = RaggedTrees(tuple(random_tree(rng, nodes[0] if uniform else n) for n in nodes))
        self.prefix = [rng.choice([0, 1, rng.randint(0, 40)]) for _ in range(count)]
        options = {"page_size": rng.choice([1, 4, 16]), "window": rng.choice([None, None, 3, 17])}
        options |= {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 16, "seed": seed}
        options |= {"slot_layout": "shuffled_pages", **case}
        self.case = Case(
            mode="verify", prefix_lens=tuple(self.prefix), extend_lens=tuple(self.trees.draft_lens), **options
        )
        self.world = World(self.case, backend=backend)
        for slots, prefix in zip(self.world.slots, self.prefix, strict=True):
            self.world.fill(slots[:prefix])
        tokens = sum(self.trees.draft_lens)
        self.q, self.k, self.v = self.world.fused(tokens, (4, 16), (2, 16), (2, 16), strided=False)
        pairs = zip(self.world.slots, self.prefix, self.trees.draft_lens, strict=True)
        self.loc = torch.cat([slots[p : p + d] for slots, p, d in pairs])
        self.world.expect(self.loc, self.k, self.v)

    def mask(self, mode: anyattn.TreeMaskMode) -> anyattn.VerifyMask:
        return anyattn.VerifyMask.allocate(mode, max_requests=6, draft_tokens=8, max_context=64)

    def run(self, batch: anyattn.ForwardBatch) -> torch.Tensor:
        backend = self.world.backend
        with anyattn.forward_context(backend, backend.init_forward_metadata(batch)):
            out = self.world.layer(self.q, self.k, self.v, batch)
        assert isinstance(out, torch.Tensor)
        return out

    def expected(self) -> torch.Tensor:
        requests = [
            oracle.OracleRequest(
                slots=slots[: p + tree.num_nodes].tolist(),
                num_queries=tree.num_nodes,
                positions=tree.positions(p),
                mask=tree.full_mask(p),
            )
            for slots, p, tree in zip(self.world.slots, self.prefix, self.trees.trees, strict=True)
        ]
        spec = self.case.spec()
        want, _ = oracle.attend(
            self.q, self.world.keys, self.world.values, requests, scale=spec.scale, window=spec.sliding_window
        )
        return want
