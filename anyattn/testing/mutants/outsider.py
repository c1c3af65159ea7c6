"""Faults invented from public bug reports and the code alone, by somebody who had not read the kit.

Each comment says which fault of a real system is imitated; `report` names a thread only where it tells of
that very kind of fault. What the kit misses here is a hole in the kit.
"""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_ATTEND = "anyattn.backends.reference.attend"
_NATIVE = "anyattn.backends.reference.torch_native"
_STATE = "anyattn.core.state:AttentionState"
_COMPILER = "anyattn.core.metadata.compiler:MetadataCompiler"
_TABLES = "anyattn.core.metadata.tables"
_CONTRACT = "anyattn.core.contract:AttentionBackend"
_POOL = "anyattn.core.kv.pools.mha:MHAPool"
_SCALES = "anyattn.core.kv.scales"

MUTANTS = (
    # A path that leaves the softmax scale to its library gets 1/sqrt(D): wrong for models with a
    # query scale of their own.
    Mutant(
        name="default scale in place of the model's",
        where=f"{_ATTEND}:_fused",
        old="scale=spec.scale",
        new="scale=None",
        names=("scale",),
    ),
    # The cap is meant for scaled logits; kernels that fold the scale into the exponent cap before it.
    Mutant(
        name="logits capped before they are scaled",
        where=f"{_ATTEND}:_explicit",
        old="scores.div_(spec.logit_cap).tanh_().mul_(spec.logit_cap)",
        new="scores.div_(spec.scale * spec.logit_cap).tanh_().mul_(spec.scale * spec.logit_cap)",
        names=("cap",),
    ),
    # Long prompts are attended to in blocks of queries; a block reads the mask from its first row on.
    Mutant(
        name="every block of queries reads the first block's mask",
        where=f"{_ATTEND}:attend",
        old="seen[rows]",
        new="seen[: min(step, q.shape[0] - start)]",
        names=("long", "block", "score"),
    ),
    # An early return leaves `torch.empty` memory where a query has no key (an empty encoder).
    Mutant(
        name="output of queries without any key never written",
        where=f"{_ATTEND}:_no_keys",
        old="out.zero_()",
        new="pass",
        names=("no key", "empty", "cross"),
        report="vllm#37682",
    ),
    # Weights are cast to a 16-bit type before the second product, although the model is float32.
    Mutant(
        name="softmax weights rounded to bfloat16",
        where=f"{_ATTEND}:_explicit",
        old="scores.sub_(safe[..., None]).exp_()",
        new="scores.sub_(safe[..., None]).exp_().bfloat16().float()",
        names=("float32", "error"),
    ),
    # Masks are built once a step and shared by layers: the key forgets which layers may share.
    Mutant(
        name="mask of another table group reused",
        where=f"{_NATIVE}:TorchNative._visible",
        old="key = (call.group.table, rows.index)",
        new="key = (0, rows.index)",
        names=("window", "group", "layers", "mask"),
    ),
    # "One query sees everything" holds for the causal rule, not for an explicit mask.
    Mutant(
        name="explicit mask ignored for a single query",
        where=f"{_NATIVE}:TorchNative._visible",
        old=" and plan.mask_cells is None",
        new="",
        names=("mask",),
        report="diffusers#12605",
    ),
    # A mask of the drafts among themselves is widened to the prefix with the wrong fill.
    Mutant(
        name="prefix hidden from a tree of drafts",
        where=f"{_NATIVE}:_mask",
        old="value=True",
        new="value=False",
        names=("tree", "verify", "mask", "draft"),
    ),
    # Chunked prefill: new keys are put before the cached ones, while the mask has them behind.
    Mutant(
        name="unstored keys put before the cached ones",
        where=f"{_NATIVE}:TorchNative.forward_extend",
        old=(
            "keys = torch.cat((keys[:cached], appended[0][rows.q]))\n"
            "            values = torch.cat((values[:cached], appended[1][rows.q]))"
        ),
        new=(
            "keys = torch.cat((appended[0][rows.q], keys[:cached]))\n"
            "            values = torch.cat((appended[1][rows.q], values[:cached]))"
        ),
        names=("nothing stored", "unstored"),
    ),
    # Tiles anchored at the trimmed table's first key move with the chunking, and so do the sums.
    Mutant(
        name="tiles anchored at the trimmed table",
        where=f"{_NATIVE}:TorchNative.forward_extend",
        old="first_key=rows.start",
        new="first_key=0",
        names=("invarian", "bits", "chunk"),
    ),
    # Offsets of packed masks computed as request number x the first request's size.
    Mutant(
        name="every mask takes the first request's room",
        where="anyattn.core.metadata.masks:prepare_mask",
        old="sizes = (rows * width for rows, width in zip(plan.host_extend_lens, columns, strict=True))",
        new="sizes = [plan.host_extend_lens[0] * columns[0]] * len(columns)",
        names=("tree", "verify", "mask", "draft"),
        report="sglang#9279",
    ),
    # Row of the batch taken for row of the request table: right only while requests stand in order.
    Mutant(
        name="table read by batch row",
        where=f"{_TABLES}:fill_csr",
        old="source[rows[row], column]",
        new="source[row, column]",
        names=("table", "slots", "rows", "order", "indices"),
    ),
    # Search on the wrong side: a request's first token is counted to the request before it.
    Mutant(
        name="first token placed in the request before it",
        where=f"{_TABLES}:fill_positions",
        old="right=True",
        new="right=False",
        names=("positions", "tables"),
    ),
    # Cross-attention planned with the decoder's lengths.
    Mutant(
        name="encoder table cut to the decoder's lengths",
        where=f"{_COMPILER}._fill_tables",
        old="seq = prefix = plan.encoder_lens",
        new="prefix = plan.encoder_lens",
        names=("cross", "encoder"),
    ),
    # The plan of a split prefill lies in buffers that the decode steps in between overwrite.
    Mutant(
        name="split prefill's plan overwritten by other steps",
        where=f"{_CONTRACT}.init_forward_metadata_out_graph",
        old="None if batch.forward_mode is ForwardMode.SPLIT_PREFILL else self._buffers",
        new="self._buffers",
        names=("split", "SPLIT"),
    ),
    # Padded rows claim a mass of one, so that merging them with another part halves it.
    Mutant(
        name="padded rows with a log-sum-exp of zero",
        where=f"{_CONTRACT}._clear_padding",
        old="lse[padding] = -torch.inf",
        new="lse[padding] = 0",
        names=("pad",),
    ),
    # -inf minus -inf: two parts without keys merge to NaN.
    Mutant(
        name="two empty states merge to NaN",
        where=f"{_STATE}.merge",
        old="torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)",
        new="lse",
        names=("merge", "empty"),
    ),
    # Outputs sized by the key's head size, where values have another.
    Mutant(
        name="output sized by the key's head size",
        where="anyattn.core.shapes:output_like",
        old="spec.num_q_heads, spec.v_head_dim",
        new="spec.num_q_heads, spec.head_dim",
        names=("out", "v_head_dim", "Dv"),
    ),
    # V divided by K's scale when stored, multiplied by its own when read.
    Mutant(
        name="values stored with the key scale",
        where=f"{_POOL}.write",
        old="(self._v[layer_id], v, v_scale, axes.value)",
        new="(self._v[layer_id], v, k_scale, axes.value)",
        names=("scale",),
    ),
    # One layer's scales serve all: consistent when written and read back, wrong for who reads the cache.
    Mutant(
        name="first layer's scales for every layer",
        where=f"{_POOL}.scales",
        old="self.storage_layer(layer_id)",
        new="self.storage_layer(0)",
        names=("scale",),
    ),
    # Per-head scales of a checkpoint collapsed to one number, on both the writing and the reading side.
    Mutant(
        name="scales per head collapsed to the first",
        where=f"{_SCALES}:KVScale.of",
        old="torch.tensor(values, ",
        new="torch.tensor(values[:1] * len(values), ",
        names=("scale",),
    ),
    # The largest value of e4m3fn used as the bound of every 8-bit format.
    Mutant(
        name="every 8-bit format saturates at 448",
        where=f"{_SCALES}:quantize",
        old="torch.finfo(dtype).max",
        new="448.0",
        names=("saturat", "fp8", "float8", "e5m2", "fnuz"),
    ),
)
