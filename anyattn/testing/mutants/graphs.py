"""Faults in capture and replay: what goes stale inside a graph gives wrong text and no error.

All but the last few are in code that every backend shares; each backend's hunt takes those that it can show.
"""

from __future__ import annotations

from dataclasses import dataclass

from anyattn.testing.mutants.patching import Mutant

__all__ = ["GRAPH_MUTANTS", "SHARED", "GraphMutant"]


@dataclass(frozen=True, kw_only=True)
class GraphMutant(Mutant):
    """`check`: the one of `graph_checks` that shows it, `on` the first setup with this word in its name."""

    check: str
    on: str = "decode"


_RUNNER = "anyattn.core.graph.runner:GraphRunner"
_PADDER = "anyattn.core.graph.padding:Padder"
_COMPILER = "anyattn.core.metadata.compiler:MetadataCompiler"
_CONTRACT = "anyattn.core.contract:AttentionBackend"
_PLAN = "anyattn.core.plan"

SHARED: tuple[GraphMutant, ...] = (
    GraphMutant(
        name="static input bound anew instead of copied into",
        check="addresses",
        where=f"{_RUNNER}.prepare",
        old="copy_in(entry.inputs[name], value)",
        new="dict.__setitem__(entry.inputs, name, value)",
        names=("rebinding",),
    ),
    GraphMutant(
        name="lengths and slots of the captured step: nothing is uploaded before a replay",
        check="replays",
        where=f"{_COMPILER}.refresh",
        old="self._upload_again(batch, plan, plan.storage, pack)",
        new="pass",
        names=("seq_lens is not this step's",),
    ),
    GraphMutant(
        name="uploads go to new memory before a replay",
        check="replays",
        where=f"{_COMPILER}.refresh",
        old="self._upload_again(batch, plan, plan.storage, pack)",
        new="self._upload(batch, self._fresh)",
        names=("seq_lens is not this step's", "allocation at replay"),
    ),
    GraphMutant(
        name="padding not reset when a batch shrinks",
        check="replays",
        where="anyattn.core.graph.padding:_Whole.fill",
        old="rows[:, requests : self.used] = self.fills",
        new="pass",
        names=("out_cache_loc of full is not", "req_pool_indices is not"),
    ),
    GraphMutant(
        name="padded requests carry another length than the backend's fill",
        check="replays",
        where=f"{_PADDER}.__init__",
        old='_Field("seq_lens", False, fill_len)',
        new='_Field("seq_lens", False, fill_len + 1)',
        names=("seq_lens is not",),
    ),
    GraphMutant(
        name="padded requests name the row of a real one",
        check="replays",
        where=f"{_PADDER}.__init__",
        old='_Field("req_pool_indices", False, table.padding_row)',
        new='_Field("req_pool_indices", False, 0)',
        names=("req_pool_indices is not",),
    ),
    GraphMutant(
        name="padded tokens are written to a slot that somebody owns",
        check="padding",
        where=f"{_PADDER}.__init__",
        old='_Field("out_cache_loc", True, 0)',
        new='_Field("out_cache_loc", True, table.req_to_token.shape[1])',
        names=("out_cache_loc of full is not", "wrote to slots beyond page 0"),
    ),
    GraphMutant(
        name="padding that a batch brings along counted as requests",
        check="padding",
        where=f"{_PADDER}._batch",
        old="num_padding_requests=batch.num_padding_requests + added",
        new="num_padding_requests=added",
        names=("req_pool_indices out of range",),
    ),
    GraphMutant(
        name="inputs behind the batch are an earlier step's",
        check="replays",
        where="anyattn.core.graph.static:copy_in",
        old="static[rows:].zero_()",
        new="pass",
        names=("padded rows are not finite",),
    ),
    GraphMutant(
        name="rows of padding handed out with the step's",
        check="replays",
        where="anyattn.core.graph.static:cut",
        old="return outputs[:tokens]",
        new="return outputs[:padded]",
        names=("rows for a step of",),
    ),
    GraphMutant(
        name="outputs zeroed as padding inside the graph",
        check="replays",
        where=f"{_PADDER}._batch",
        old="captured_mode=self.key.mode",
        new="captured_mode=None",
        names=("differs from the eager step",),
    ),
    GraphMutant(
        name="tables of the captured step: none are filled at a replay",
        check="replays",
        where=f"{_RUNNER}._capture",
        old="if not self._early:",
        new="if self._early:",
        names=("is not this step's",),
    ),
    GraphMutant(
        name="bound of the captured batch frozen",
        check="limits",
        where=f"{_COMPILER}.prepare",
        old="self.table.max_context if in_capture else max_kv_len",
        new="max_kv_len",
        names=("of the captured batch is frozen",),
    ),
    GraphMutant(
        name="host lengths of the captured step",
        check="replays",
        where=f"{_PLAN}:Plan.retarget",
        old='made.pop("host_seq_lens", None)',
        new="pass",
        names=("host_seq_lens is not",),
    ),
    GraphMutant(
        name="sync before a replay",
        check="host-syncs",
        where=f"{_RUNNER}.prepare",
        old="padded = entry.padder.pad(batch, entry.plan)\n",
        new="padded = entry.padder.pad(batch, entry.plan)\n    int(entry.plan.seq_lens[:1].max())\n",
        names=("host sync",),
    ),
    GraphMutant(
        name="allocation before each replay",
        check="allocations",
        where=f"{_RUNNER}.prepare",
        old="padded = entry.padder.pad(batch, entry.plan)\n",
        new="padded = entry.padder.pad(batch, entry.plan)\n    entry.plan.seq_lens.clone()\n",
        names=("allocation at replay",),
    ),
    GraphMutant(
        name="fence recorded before the graph, though kernels still read",
        check="read-done",
        where=f"{_RUNNER}.prepare",
        old="if self._early and entry.read_ends <= SharedReadEnds.IN_REPLAY:",
        new="if True:",
        names=("read_done",),
    ),
    GraphMutant(
        name="fence recorded before tables are filled",
        check="read-done",
        where=f"{_RUNNER}.prepare",
        old="padded = entry.padder.pad(batch, entry.plan)",
        new="self.read_done.record()\n    padded = entry.padder.pad(batch, entry.plan)",
        names=("read_done",),
    ),
    GraphMutant(
        name="a step one over runs in a bucket that is too small",
        check="buckets",
        where="anyattn.core.graph.buckets:Buckets.fit",
        old="if num_requests > self.sizes[-1]:",
        new="num_requests = min(num_requests, self.largest)\n    if num_requests > self.largest:",
        names=("one over",),
    ),
    GraphMutant(
        name="a full bucket runs in the next one",
        check="buckets",
        where="anyattn.core.graph.buckets:Buckets.fit",
        old="bisect_left(self.sizes, num_requests)",
        new="min(len(self.sizes) - 1, bisect_left(self.sizes, num_requests + 1))",
        names=("run in the bucket of",),
    ),
    GraphMutant(
        name="a replaced pool goes unnoticed",
        check="refusals",
        where="anyattn.core.graph.static:PoolGuard.check_pool",
        old="if backend.pool is not pool:",
        new="if False:",
        names=("pool was replaced",),
    ),
    GraphMutant(
        name="a replay inside a capture goes unnoticed",
        check="refusals",
        where="anyattn.core.graph.static:PoolGuard.check_idle",
        old="if is_capturing(self._device):",
        new="if False:",
        names=("inside a capture",),
    ),
    GraphMutant(
        name="staging buffer reused before its copy ended",
        check="staging",
        where="anyattn.core.metadata.upload:Uploader._entered",
        old="slot.copied.synchronize()",
        new="pass",
        names=("staging buffer was reused early",),
    ),
    GraphMutant(
        name="sync inside the graph",
        check="replays",
        where=f"{_CONTRACT}.init_forward_metadata_in_graph",
        old="self.compiler.fill(plan)",
        new="self.compiler.fill(plan)\n    plan.seq_lens.max().item()",
        names=("can't be captured", "the capture failed"),
    ),
)
"""In code that all backends share. The last breaks the capture itself."""

_MASKS = (
    GraphMutant(
        name="another batch's mask taken for the captured one",
        check="mask",
        on="tree",
        where="anyattn.core.graph.admission:_same_buffer",
        old="a.mode is b.mode and a.buffer.data_ptr() == b.buffer.data_ptr()",
        new="True",
        names=("another batch's mask",),
    ),
    GraphMutant(
        name="positions of padded tokens not reset",
        check="replays",
        on="tree",
        where="anyattn.core.graph.padding:Padder.__init__",
        old='_Field("positions", True, 0)',
        new='_Field("positions", True, 3)',
        names=("positions is not",),
    ),
    GraphMutant(
        name="offsets of the mask are the captured step's",
        check="replays",
        on="tree",
        where="anyattn.core.metadata.masks:fill_mask",
        old="if not isinstance(mask, VerifyMask):",
        new="if not isinstance(mask, VerifyMask) or plan.batch.captured_mode is not None:",
        names=("against the oracle",),
    ),
)
"""For backends that take tree masks in graphs."""

_TABLES = (
    GraphMutant(
        name="tables as wide as the captured batch needs",
        check="limits",
        where=f"{_COMPILER}._new_table",
        old="largest=storage.stable",
        new="largest=False",
        names=("has room for",),
    ),
    GraphMutant(
        name="host offsets of tables are the captured step's",
        check="replays",
        where=f"{_PLAN}:Table.remirror",
        old='self.__dict__.pop("host", None)',
        new="pass",
        names=("host indptr",),
    ),
)
"""For backends that read tables made for the step."""

_PRIVATE = (
    GraphMutant(
        name="the captured plan is dropped, and freed, after the capture",
        check="keeps-alive",
        where=f"{_RUNNER}._capture",
        old="made = Captured(key, graph, plan,",
        new="plan = self.backend.init_forward_metadata_out_graph(batch, in_capture=True)\n"
        "    made = Captured(key, graph, plan,",
        names=("freed memory",),
    ),
)
"""For backends whose plans own what kernels write: workspaces, plan buffers."""

_REPLAN = (
    GraphMutant(
        name="plan frozen at warm-up: the library doesn't plan again",
        check="replays",
        where=f"{_CONTRACT}.init_forward_metadata_out_graph",
        old="self.replan(captured)",
        new="pass",
        names=("against the oracle", "differs from the eager step"),
    ),
)
"""For libraries that plan from lengths."""

_FUSED = (
    GraphMutant(
        name="allocation inside the graph",
        check="allocations",
        where=f"{_CONTRACT}.init_forward_metadata_in_graph",
        old="self.compiler.fill(plan)",
        new="self.compiler.fill(plan)\n    plan.seq_lens + 1",
        names=("allocation in the graph",),
    ),
    GraphMutant(
        name="windows begin where the captured step's began",
        check="replays",
        on="window",
        where="anyattn.kernels.triton.metadata_launch:_slot",
        old="return (table.kv_start,",
        new="return (table.kv_start.clone(),",
        names=("window",),
    ),
)
"""For backends whose tables a kernel of ours fills."""

GRAPH_MUTANTS: dict[str, tuple[GraphMutant, ...]] = {
    "triton": (*SHARED, *_MASKS, *_FUSED, *_PRIVATE),
    "fa3": (*SHARED, *_MASKS, *_TABLES),
    "fa4": (*SHARED, *_TABLES),
    "flashinfer": (*SHARED, *_TABLES, *_REPLAN, *_PRIVATE),
}
"""By backend; any other takes those that are shared."""
