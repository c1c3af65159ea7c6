"""Trees: what follows from the parents, by brute force; and parents that can't be."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyattn.core.speculative.accept import accept, accept_on_device, reject_chain
from anyattn.core.speculative.tree import Tree, TreeBuilder
from anyattn.errors import BatchError


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    nodes = draw(st.integers(1, 12))
    return Tree((-1, *(draw(st.integers(-1, i - 1)) for i in range(1, nodes))))


@given(trees(), st.integers(0, 5))
def test_what_follows_from_the_parents(tree: Tree, prefix: int) -> None:
    mask, full = tree.mask(), tree.full_mask(prefix)
    assert full[:, :prefix].all()
    assert torch.equal(full[:, prefix:], mask)
    for node in range(tree.num_nodes):
        path = tree.path(node)
        assert mask[node].nonzero().flatten().tolist() == sorted(path) == path
        assert tree.depths[node] == len(path) - 1
        assert tree.positions(prefix)[node] == prefix + len(path) - 1
        for child in tree.children[node]:
            assert tree.parents[child] == node
    hung = sum(len(c) for c in tree.children) + sum(p < 0 for p in tree.parents)
    assert hung == tree.num_nodes
    assert tree.is_chain == (sorted(tree.depths) == list(range(tree.num_nodes)))


@pytest.mark.parametrize(
    ("parents", "node"), [((0,), 0), ((-1, 1), 1), ((-1, 0, 5), 2), ((-1, -2), 1), ((-1, 2, 0), 1)]
)
def test_parents_that_are_not_earlier_nodes_are_refused(parents: tuple[int, ...], node: int) -> None:
    with pytest.raises(BatchError, match=f"parent of node {node} isn't an earlier node"):
        Tree(parents)
    with pytest.raises(BatchError, match="without nodes"):
        Tree(())


def test_padding_hangs_on_the_root() -> None:
    tree = Tree((-1, 0, 1)).padded(5)
    assert tree.parents == (-1, 0, 1, 0, 0)
    with pytest.raises(BatchError, match="larger than it is to be padded to"):
        tree.padded(4)


def test_the_builder_shares_beginnings_and_stops_when_full() -> None:
    made = TreeBuilder(7, max_nodes=6)
    for path in ([1, 2, 3], [1, 2, 4], [1, 5, 9]):
        made.add(path)
    assert made.tokens == [7, 1, 2, 3, 4, 5]
    assert made.tree.parents == (-1, 0, 1, 2, 2, 1)
    assert made.room == 0
    assert list(made.paths()) == [[1, 2, 3], [1, 2, 4], [1, 5]]


@pytest.mark.parametrize("seed", range(60))
def test_acceptance_follows_the_targets_choices(seed: int) -> None:
    """On few tokens, so that matches are common; host and device agree with every path tried."""
    rng = random.Random(seed)
    batch, nodes = rng.randint(1, 4), rng.randint(1, 9)
    given_trees = [Tree((-1, *(rng.randrange(i) for i in range(1, nodes)))) for _ in range(batch)]
    tokens = torch.tensor([[rng.randrange(3) for _ in range(nodes)] for _ in range(batch)])
    targets = torch.tensor([[rng.randrange(3) for _ in range(nodes)] for _ in range(batch)])
    parents = torch.tensor([t.parents for t in given_trees])
    path, counts = accept_on_device(parents, tokens, targets)
    for b, tree in enumerate(given_trees):
        asked: list[int] = []
        row: list[int] = targets[b].tolist()

        def choose(node: int, row: list[int] = row, asked: list[int] = asked) -> int:
            asked.append(node)
            return row[node]

        found = accept(tree, tokens[b].tolist(), choose)
        assert asked == list(found.path) == path[b, : counts[b]].tolist()
        assert found.tokens == tuple(targets[b, n] for n in found.path)
        assert tree.path(found.path[-1]) == list(found.path)
        for above, node in zip(found.path, found.path[1:], strict=False):
            assert tokens[b, node] == targets[b, above]
        assert not [c for c in tree.children[found.path[-1]] if tokens[b, c] == found.tokens[-1]]
        assert path[b, counts[b] :].eq(0).all()


def test_padded_nodes_are_never_accepted() -> None:
    tree = Tree((-1, 0)).padded(4)
    tokens = torch.tensor([[5, 6, -1, -1]])
    path, counts = accept_on_device(torch.tensor([tree.parents]), tokens, torch.tensor([[6, 0, 0, 0]]))
    assert (path[0, :2].tolist(), counts.tolist()) == ([0, 1], [2])


def test_one_token_per_node() -> None:
    with pytest.raises(BatchError, match="tokens of a tree"):
        accept(Tree.chain(3), [1, 2], lambda node: 0)


def test_rejection_sampling_gives_the_targets_distribution() -> None:
    """Frequencies of the first two tokens against the target's product, over 20,000 chains."""
    generator = torch.Generator().manual_seed(0)
    draft = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    target = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [1.0, 0.0, 0.0]])
    counts, rounds = torch.zeros(3, 3), 20_000
    drawn = torch.stack([torch.multinomial(q, rounds, True, generator=generator) for q in draft], 1)
    for chain in drawn.tolist():
        got = reject_chain(chain, draft, target, generator)
        assert 1 <= len(got) <= 3
        assert len(got) < 3 or (got[:2] == chain and got[2] == 0)
        second = got[1] if len(got) > 1 else int(torch.multinomial(target[1], 1, generator=generator))
        counts[got[0], second] += 1
    assert (counts / rounds - target[0][:, None] * target[1][None]).abs().max() < 0.012


def test_equal_distributions_keep_every_draft() -> None:
    generator = torch.Generator().manual_seed(1)
    same = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.0, 1.0]])
    for chain in ([0, 1], [1, 1], [0, 0]):
        assert reject_chain(chain, same[:2], same, generator) == [*chain, 1]
    with pytest.raises(BatchError, match="probabilities of a chain"):
        reject_chain([0], same[:1], same[:1], generator)
