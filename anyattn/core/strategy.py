"""How an extend is computed: one table over everything, new tokens alone, or both halves merged.

Chosen once a step, from host lengths, outside any graph. A backend offers what it has (`Traits.strategies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyattn.core.batch import ForwardBatch

__all__ = ["Strategy", "choose_strategy"]


class Strategy(Enum):
    """PAGED: tables list every key, this step's own included. RAGGED: no request has a prefix, so k and v
    are all there is and no table is made. RAGGED_MERGE: tables list the cached prefix alone; the step's own
    keys come from k and v, and the two partial states are merged (`AttentionState`).
    """

    PAGED = "paged"
    RAGGED = "ragged"
    RAGGED_MERGE = "ragged_merge"


def choose_strategy(batch: ForwardBatch, offered: Sequence[Strategy]) -> Strategy:
    """RAGGED without a cached prefix, RAGGED_MERGE with one, where offered; else PAGED.

    Unknown host lengths and explicit masks (their columns count the prefix) mean PAGED: a guess could
    drop keys. So does `kv_stored`: without k and v, this step's keys are found through the table alone.
    """
    exact = batch.exact
    if (
        tuple(offered) == (Strategy.PAGED,)
        or exact is None
        or batch.mask is not None
        or batch.kv_stored
        or not batch.batch_size
    ):
        return Strategy.PAGED
    if bool((exact.seq_lens == exact.extend_lens).all()):
        return Strategy.RAGGED if Strategy.RAGGED in offered else Strategy.PAGED
    return Strategy.RAGGED_MERGE if Strategy.RAGGED_MERGE in offered else Strategy.PAGED
