"""What a backend declares about one forward mode. Ordered, so that a wrapper takes a max or a min."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum

from anyattn.core.strategy import Strategy

__all__ = [
    "Determinism",
    "GraphSupport",
    "HostLengthNeed",
    "KVRead",
    "MixedSupport",
    "SharedReadEnds",
    "Traits",
    "TreeMaskMode",
]


class HostLengthNeed(IntEnum):
    """Lengths wanted on the host: none, an upper bound, or the exact values."""

    NONE = 0
    BOUND = 1
    EXACT = 2


class SharedReadEnds(IntEnum):
    """When a step has read the last of what the scheduler may overwrite (tables, lengths, slots)."""

    PRE_REPLAY = 1  # during init_forward_metadata_out_graph
    IN_REPLAY = 2  # with init_forward_metadata_in_graph
    POST_REPLAY = 3  # kernels read the live tables
    UNKNOWN = 4


class GraphSupport(IntEnum):
    """Which batches of a mode may be captured as a whole."""

    NEVER = 0
    UNIFORM = 1  # every request has the same number of query tokens
    ALWAYS = 2


class Determinism(IntEnum):
    """NONE < RUN_TO_RUN < BATCH_INVARIANT (alone = batched = re-chunked, bit for bit)."""

    NONE = 0
    RUN_TO_RUN = 1
    BATCH_INVARIANT = 2


class KVRead(Enum):
    """Does a step attend to its own tokens as stored (quantised) or as given."""

    READ_BACK = "read_back"
    DIRECT = "direct"


class MixedSupport(Enum):
    """How MIXED batches run: a kernel of their own, as an extend, or not at all."""

    NATIVE = "native"
    AS_EXTEND = "as_extend"
    REFUSED = "refused"


class TreeMaskMode(Enum):
    """Which cells a tree mask has: all columns, or only those of the draft tokens."""

    FULL_MASK = "full_mask"
    QLEN_ONLY = "qlen_only"


@dataclass(frozen=True)
class Traits:
    """Declarations for one mode. The defaults are the cautious ones.

    `tree_mask` is the form that verification reads cheapest: QLEN_ONLY says that both are read as they
    are; otherwise the compiler spells QLEN_ONLY out. `strategies` are those that extends may be computed by.
    `rounds_queries`: absorbed queries are rounded to the KV dtype, for a kernel that takes both alike.
    `eager_between_graphs`: its eager steps may run between captured segments, on tensors that graphs own.
    """

    host_lengths: HostLengthNeed = HostLengthNeed.EXACT
    shared_read_ends: SharedReadEnds = SharedReadEnds.UNKNOWN
    graph: GraphSupport = GraphSupport.NEVER
    determinism: Determinism = Determinism.NONE
    kv_read: KVRead = KVRead.READ_BACK
    mixed: MixedSupport = MixedSupport.AS_EXTEND
    ragged_verify: bool = False
    tolerates_nan_tail: bool = False
    tree_mask: TreeMaskMode = TreeMaskMode.FULL_MASK
    strategies: tuple[Strategy, ...] = (Strategy.PAGED,)
    rounds_queries: bool = False
    eager_between_graphs: bool = True

    @staticmethod
    def combine(children: Iterable[Traits]) -> Traits:
        """Traits of a wrapper whose children all prepare and run in this mode.

        Needs are OR-ed (max), read ends take the latest, graph support and determinism the weakest.
        """
        items = list(children)
        if not items:
            raise ValueError("a wrapper without children has no traits")
        reads = {t.kv_read for t in items}
        mixed = {t.mixed for t in items}
        forms = {t.tree_mask for t in items}
        order = (MixedSupport.REFUSED, MixedSupport.AS_EXTEND, MixedSupport.NATIVE)
        return Traits(
            host_lengths=max(t.host_lengths for t in items),
            shared_read_ends=max(t.shared_read_ends for t in items),
            graph=min(t.graph for t in items),
            determinism=min(t.determinism for t in items),
            kv_read=reads.pop() if len(reads) == 1 else KVRead.READ_BACK,
            mixed=next(m for m in order if m in mixed),
            ragged_verify=all(t.ragged_verify for t in items),
            tolerates_nan_tail=all(t.tolerates_nan_tail for t in items),
            tree_mask=forms.pop() if len(forms) == 1 else TreeMaskMode.FULL_MASK,
            strategies=tuple(s for s in items[0].strategies if all(s in t.strategies for t in items)),
            rounds_queries=any(t.rounds_queries for t in items),
            eager_between_graphs=all(t.eager_between_graphs for t in items),
        )
