"""Which drafts are accepted: by the target's own choice at each node, or by rejection sampling on a chain.

Following the target's choice is exact for greedy decoding, and for sampling too if the choice at a node is
drawn from the target's distribution there: the text is the one that plain decoding would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from anyattn.core.speculative.tree import Tree
from anyattn.errors import BatchError

__all__ = ["Acceptance", "accept", "accept_on_device", "reject_chain"]


@dataclass(frozen=True)
class Acceptance:
    """`path`: accepted nodes, the root first; `tokens`: what the step yields, one token per node of `path`.

    The last of `tokens` is the target's choice after the last accepted node: its KV isn't there yet.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]


def accept(tree: Tree, tokens: Sequence[int], choose: Callable[[int], int]) -> Acceptance:
    """Walk from node 0 to the child that holds the target's choice, as long as there is one.

    Args:
        tokens: token of each node.
        choose: the target's next token after a node (argmax of its logits, or a draw); called once per
            accepted node, in order.

    Raises:
        BatchError: not one token per node.
    """
    if len(tokens) != tree.num_nodes:
        raise BatchError(
            "tokens of a tree", asked=len(tokens), allowed=tree.num_nodes, hint="one token per node"
        )
    node, path, chosen = 0, [0], [choose(0)]
    while True:
        fitting = (child for child in tree.children[node] if tokens[child] == chosen[-1])
        found = next(fitting, None)
        if found is None:
            return Acceptance(tuple(path), tuple(chosen))
        node = found
        path.append(node)
        chosen.append(choose(node))


def accept_on_device(
    parents: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept` for many trees of d nodes at once: static shapes, no host sync.

    Args:
        parents: int64 `[B, d]`, -1 for node 0. tokens: `[B, d]`; padded nodes hold -1.
        targets: `[B, d]`, the target's choice after each node.

    Returns:
        path int64 `[B, d]` (accepted nodes first, then node 0) and counts int64 `[B]`, the root included.
        The tokens that the step yields are `targets` along the path.
    """
    batch, nodes = parents.shape
    current = torch.zeros(batch, dtype=torch.int64, device=parents.device)
    alive = torch.ones(batch, dtype=torch.bool, device=parents.device)
    path = torch.zeros(batch, nodes, dtype=torch.int64, device=parents.device)
    counts = torch.ones(batch, dtype=torch.int64, device=parents.device)
    for step in range(1, nodes):
        wanted = targets.gather(1, current[:, None])
        fitting = (parents == current[:, None]) & (tokens == wanted)
        alive = alive & fitting.any(1)
        current = torch.where(alive, fitting.to(torch.uint8).argmax(1), current)
        path[:, step] = torch.where(alive, current, 0)
        counts += alive
    return path, counts


def reject_chain(
    tokens: Sequence[int], draft: torch.Tensor, target: torch.Tensor, generator: torch.Generator
) -> list[int]:
    """Rejection sampling of a chain of n drafts (Leviathan et al., arXiv 2211.17192, algorithm 1).

    Draft i is kept with probability min(1, p_i / q_i); the first that isn't is replaced by a draw from
    max(0, p - q), normalised; after n kept drafts one token is drawn from the target. What comes out is
    distributed as if the target had been sampled token by token.

    Args:
        tokens: the drafts, drawn from `draft [n, V]`, the draft model's probabilities q.
        target: `[n + 1, V]`, the target's probabilities p, before each draft and behind the last.

    Returns:
        1 .. n + 1 tokens.

    Raises:
        BatchError: sizes that disagree.
    """
    count = len(tokens)
    if draft.shape[0] != count or target.shape[0] != count + 1:
        raise BatchError(
            "probabilities of a chain (draft rows, target rows)",
            asked=(draft.shape[0], target.shape[0]),
            allowed=(count, count + 1),
            hint="one row per draft, and one more of the target",
        )
    kept: list[int] = []
    for index, token in enumerate(tokens):
        p, q = target[index].double(), draft[index].double()
        draw = float(torch.rand((), generator=generator, dtype=torch.float64))
        if draw * float(q[token]) < float(p[token]):
            kept.append(int(token))
            continue
        rest = (p - q).clamp_min(0)
        weights = rest if float(rest.sum()) > 0 else p
        return [*kept, int(torch.multinomial(weights, 1, generator=generator))]
    return [*kept, int(torch.multinomial(target[count].double(), 1, generator=generator))]
