"""What the host can say about the draft tokens of a TARGET_VERIFY step."""

from __future__ import annotations

from anyattn.core.batch import ForwardBatch, UpperBound
from anyattn.errors import BatchError

__all__ = ["check_drafts", "is_ragged"]


def is_ragged(batch: ForwardBatch) -> bool:
    """Real requests have different numbers of draft tokens, as far as the host knows."""
    if batch.exact is None:
        return False
    lens = batch.exact.extend_lens[: batch.batch_size - batch.num_padding_requests]
    return bool(lens.numel()) and int(lens.min()) != int(lens.max())


def check_drafts(batch: ForwardBatch, most: int) -> None:
    """No request verifies more than `most` tokens (`Limits.max_draft_tokens`), the root included.

    Raises:
        BatchError: one does.
    """
    longest = 0
    if batch.exact is not None and batch.batch_size:
        longest = int(batch.exact.extend_lens.max())
    elif isinstance(batch.host_lens, UpperBound):
        longest = batch.host_lens.max_extend_len
    if longest > most:
        raise BatchError(
            "more draft tokens in a request than Limits.max_draft_tokens",
            asked=longest,
            allowed=f"<= {most}",
            hint="select(limits=Limits(..., max_draft_tokens=...)), or draft fewer tokens",
        )
