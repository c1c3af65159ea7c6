"""`Tree`: draft tokens as a tree, given by each node's parent; what verification needs of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from anyattn.errors import BatchError

__all__ = ["Tree", "TreeBuilder"]


@dataclass(frozen=True)
class Tree:
    """Nodes 0 .. d - 1 in the order of their query rows; `parents[i]` is an earlier node, or -1.

    -1 hangs a node on the prefix. Usually node 0 alone does: the last token that was sampled, whose KV isn't
    there yet; the drafts hang below it.

    Raises:
        BatchError: no node, or a parent that isn't an earlier node.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(int(p) for p in self.parents))
        if not self.parents:
            raise BatchError(
                "a tree without nodes", asked="[]", allowed="at least one node", hint="Tree.chain(1)"
            )
        wrong = [i for i, parent in enumerate(self.parents) if not -1 <= parent < i]
        if wrong:
            raise BatchError(
                f"the parent of node {wrong[0]} isn't an earlier node",
                asked=self.parents[wrong[0]],
                allowed=f"-1 (the prefix) .. {wrong[0] - 1}",
                hint="number the nodes so that each comes after its parent",
            )

    @staticmethod
    def chain(length: int) -> Tree:
        """`length` nodes, each the child of the one before it."""
        return Tree(tuple(range(-1, length - 1)))

    @property
    def num_nodes(self) -> int:
        """d, the root included."""
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Plain causal order says it all: no mask is needed."""
        return self.parents == tuple(range(-1, self.num_nodes - 1))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the prefix's end: 0 for children of the prefix."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Each node's children, in order."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(node)
        return tuple(tuple(nodes) for nodes in found)

    def positions(self, prefix_len: int) -> list[int]:
        """Token position of each node; siblings share one."""
        return [prefix_len + depth for depth in self.depths]

    def path(self, node: int) -> list[int]:
        """Nodes from the prefix's child down to `node`."""
        nodes = [node]
        while self.parents[nodes[-1]] >= 0:
            nodes.append(self.parents[nodes[-1]])
        return nodes[::-1]

    def mask(self) -> torch.Tensor:
        """Bool `[d, d]` (QLEN_ONLY): a node sees its ancestors and itself."""
        cells = torch.eye(self.num_nodes, dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                cells[node] |= cells[parent]
        return cells

    def full_mask(self, prefix_len: int) -> torch.Tensor:
        """Bool `[d, prefix + d]` (FULL_MASK): the prefix is visible to all."""
        return torch.cat((torch.ones(self.num_nodes, prefix_len, dtype=torch.bool), self.mask()), dim=1)

    def padded(self, num_nodes: int) -> Tree:
        """The tree with further children of node 0, for backends that want equal sizes.

        Raises:
            BatchError: a tree that has more nodes already.
        """
        if num_nodes < self.num_nodes:
            raise BatchError(
                "a tree larger than it is to be padded to",
                asked=self.num_nodes,
                allowed=f"<= {num_nodes}",
                hint="draft fewer tokens",
            )
        return Tree((*self.parents, *[0] * (num_nodes - self.num_nodes)))


class TreeBuilder:
    """Merges token paths below one root into a tree of at most `max_nodes` nodes; shared beginnings once.

    Attributes:
        tokens: token of each node, the root's first.
    """

    def __init__(self, root: int, max_nodes: int) -> None:
        self.tokens, self.max_nodes = [root], max_nodes
        self._parents = [-1]
        self._child: dict[tuple[int, int], int] = {}

    @property
    def tree(self) -> Tree:
        """The tree so far."""
        return Tree(tuple(self._parents))

    @property
    def room(self) -> int:
        """Nodes that may still be added."""
        return self.max_nodes - len(self.tokens)

    def add(self, path: Iterable[int]) -> None:
        """Add a path below the root, as far as there is room."""
        node = 0
        for token in path:
            following = self._child.get((node, token))
            if following is None:
                if self.room <= 0:
                    return
                following = self._child[node, token] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
            node = following

    def paths(self) -> Iterator[Sequence[int]]:
        """Tokens of every root-to-leaf path, the root's left out."""
        tree = self.tree
        for node, below in enumerate(tree.children):
            if not below and node:
                yield [self.tokens[n] for n in tree.path(node)[1:]]
