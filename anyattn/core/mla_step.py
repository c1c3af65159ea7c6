"""The latent part of a step's preparation: which method, and which keys it expands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import CapabilityRow
from anyattn.core.kv.request_table import RequestTable
from anyattn.core.metadata.upload import Uploader
from anyattn.core.mla import MLAMethod, MLAPolicy, expansion_pays, methods_of
from anyattn.core.mla_keys import MLAKeys, key_parts, prefix_chunks
from anyattn.core.plan import Plan
from anyattn.core.spec import AttentionSpec
from anyattn.core.traits import Determinism
from anyattn.errors import FeatureError

__all__ = ["MLAPlanner"]

_AUTOMATIC = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL)
"""Modes in which materialising may pay; the others add a few tokens to long prefixes."""


class MLAPlanner:
    """Sets `plan.mla_method` and `plan.mla_keys`; does nothing for models without MLA.

    Attributes:
        policy: how the method is chosen; may be replaced between steps (`create_backend(mla=…)`).
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        row_for: Callable[[ForwardMode], CapabilityRow],
        table: RequestTable,
        deterministic: Determinism = Determinism.NONE,
    ) -> None:
        """`row_for`: the capability row of a mode, whose head sizes say which methods exist."""
        self.policy, self.table = MLAPolicy(), table
        self._row_for, self._uploader = row_for, Uploader(table.device)
        self._specs = tuple(dict.fromkeys(s for s in specs if s.mla is not None))
        self._windowed = any(s.sliding_window is not None for s in self._specs)
        # The cheaper method depends on who else is in the batch, and so would the bits.
        self._invariant = deterministic is Determinism.BATCH_INVARIANT

    def prepare(self, plan: Plan, *, in_capture: bool = False) -> None:
        """Host half: the method, and the lengths of its parts. A graph bakes no lengths: it is absorbed.

        Raises:
            FeatureError: a step that needs a method which the backend's row doesn't have.
        """
        if not self._specs:
            return
        method = self._method(plan, in_capture)
        plan.mla_method = method
        if method.expands:
            assert plan.host_seq_lens is not None
            prefix, new = _lengths(plan)
            read = [p if e else 0 for p, e in zip(prefix, new, strict=True)]
            chunks = prefix_chunks(read, self.policy.chunk_tokens)
            first, *others = key_parts([(prefix, new), *chunks], self._uploader)
            plan.mla_keys = MLAKeys(first, tuple(others))

    def fill(self, plan: Plan) -> None:  # anyattn: in-graph
        """Device half: slots of every part."""
        if plan.mla_keys is not None:
            for part in (plan.mla_keys.new, *plan.mla_keys.prefix):
                part.fill(self.table.req_to_token, plan.req_pool_indices)

    def _method(self, plan: Plan, in_capture: bool) -> MLAMethod:
        mode = plan.key.mode
        if mode is ForwardMode.IDLE:
            return MLAMethod.ABSORBED
        row = self._row_for(mode)
        able = frozenset.intersection(*(methods_of(row, spec) for spec in self._specs))
        exact = plan.host_seq_lens is not None and not in_capture
        plain = plan.batch.mask is None and not self._windowed
        usable = able if exact and plain else able - {MLAMethod.MATERIALISED}
        if not usable:
            raise FeatureError(
                f"this {mode.value} step can't run by any method of latent attention that the backend has",
                asked=f"exact host lengths: {exact}, no mask and no window: {plain}",
                allowed=", ".join(sorted(m.value for m in able)) or "none",
                hint="materialised steps need exact host lengths, and have no explicit mask and no window",
            )
        method = self._wish(plan)
        if method not in usable:
            (method,) = usable
        prefix, new = _lengths(plan) if method.expands else ([], [])
        chunked = any(p and e for p, e in zip(prefix, new, strict=True))
        return MLAMethod.MATERIALISED_CHUNKED if chunked else method

    def _wish(self, plan: Plan) -> MLAMethod:
        """The policy's method, else the cheaper one."""
        if self.policy.method is not None:
            return self.policy.method
        if plan.key.mode not in _AUTOMATIC or self._invariant or plan.host_seq_lens is None:
            return MLAMethod.ABSORBED
        mla = self._specs[0].mla
        assert mla is not None
        return MLAMethod.MATERIALISED if expansion_pays(mla, *_lengths(plan)) else MLAMethod.ABSORBED


def _lengths(plan: Plan) -> tuple[list[int], list[int]]:
    """Prefix and new tokens of each request; padded requests have none."""
    assert plan.host_seq_lens is not None
    assert plan.host_extend_lens is not None
    real = len(plan.host_seq_lens) - plan.batch.num_padding_requests
    prefix = [s - e for s, e in zip(plan.host_seq_lens, plan.host_extend_lens, strict=True)]
    pads = [0] * plan.batch.num_padding_requests
    return [*prefix[:real], *pads], [*plan.host_extend_lens[:real], *pads]
