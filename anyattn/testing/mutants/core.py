"""Faults in what all backends share: compiler, contract, pool, groups."""

from __future__ import annotations

from anyattn.testing.mutants.patching import Mutant

__all__ = ["MUTANTS"]

_TABLES = "anyattn.core.metadata.tables"
_COMPILER = "anyattn.core.metadata.compiler:MetadataCompiler"
_CONTRACT = "anyattn.core.contract:AttentionBackend"
_SCALES = "anyattn.core.kv.scales"

MUTANTS = (
    Mutant(
        name="window table by radius",
        where=f"{_TABLES}:fill_kv_extent",
        old="start = (prefix_lens - (window - 1)).clamp_min_(0)",
        new="start = (prefix_lens - window).clamp_min_(0)",
        names=("window", "kv_start"),
    ),
    Mutant(
        name="window table starts inside a page",
        where=f"{_TABLES}:fill_kv_extent",
        old="kv_start.copy_(start - start % page)",
        new="kv_start.copy_(start)",
        names=("kv_start",),
        report="sglang-jax#1297",
    ),
    Mutant(
        name="slots where pages are stated",
        where=f"{_TABLES}:fill_csr",
        old="entry = entry // page",
        new="entry = entry + 0",
        names=("page_csr",),
        report="sglang#25556",
    ),
    Mutant(
        name="pages listed token by token",
        where=f"{_TABLES}:fill_block_table",
        old="token = (kv_start[:, None] + column * page)",
        new="token = (kv_start[:, None] + column)",
        names=("block_table",),
        report="sglang#7936",
    ),
    Mutant(
        name="last page full means empty",
        where=f"{_TABLES}:fill_table",
        old="last = table.kv_lens - (counts - 1).clamp_min(0) * page",
        new="last = table.kv_lens % page",
        names=("last_page_len",),
    ),
    Mutant(
        name="last page missing",
        where=f"{_TABLES}:fill_table",
        old="(table.kv_lens + (page - 1)) // page",
        new="table.kv_lens // page",
        names=("block_table", "page_csr"),
        report="sglang#11985",
    ),
    Mutant(
        name="positions from one",
        where=f"{_TABLES}:fill_positions",
        old="position = prefix_lens[row] + index - offsets[row]",
        new="position = prefix_lens[row] + index - offsets[row] + 1",
        names=("positions", "window"),
    ),
    Mutant(
        name="lengths of an earlier step",
        where=f"{_COMPILER}.prepare",
        old="given = self._upload(batch, storage)\n",
        new="given = self._upload(batch, storage)\n"
        "    seen = self.__dict__.setdefault('_seen', {})\n"
        "    given['seq_lens'] = seen.setdefault(batch.batch_size, given['seq_lens'].clone())\n",
        names=("served", "several-plans", "stable-buffers"),
        report="vllm#42444",
    ),
    Mutant(
        name="plans that share their tensors",
        where="anyattn.core.metadata.buffers:FreshStorage.packed",
        old="region = torch.empty(total, dtype=torch.uint8, device=self._device)",
        new="region = self.__dict__.setdefault('_memory', {}).setdefault(total, "
        "torch.empty(total, dtype=torch.uint8, device=self._device))",
        names=("several-plans",),
        report="vllm#36611",
    ),
    Mutant(
        name="caller's slots aliased",
        where=f"{_COMPILER}._upload",
        old="return {f[0]: view for f, (_, view) in zip(fields, vectors, strict=True)}",
        new="return {f[0]: value if f[0] == 'out_cache_loc' else view\n"
        "                for f, value, (_, view) in zip(fields, values, vectors, strict=True)}",
        names=("shared-reads",),
    ),
    Mutant(
        name="planned for the first layer's heads",
        where="anyattn.core.groups:GroupSet.from_specs",
        old="heads[group] = max(heads.get(group, 0), spec.num_q_heads)",
        new="heads.setdefault(group, spec.num_q_heads)",
        names=("head-counts",),
        report="sglang#32062",
    ),
    Mutant(
        name="layers wider than planned accepted",
        where=f"{_CONTRACT}._check_layer",
        old="layer.spec.num_q_heads > planned",
        new="False",
        names=("over-wide-layer",),
        report="sglang#32625",
    ),
    Mutant(
        name="undeclared features accepted",
        where=f"{_CONTRACT}._require",
        old="if feature not in declared:",
        new="if False:",
        names=("undeclared-feature",),
        report="vllm#48011",
    ),
    Mutant(
        name="any plan accepted",
        where=f"{_CONTRACT}._check_plan",
        old="if key.serial != batch.serial or key.owner != self.owner:",
        new="if False:",
        names=("other-plan",),
    ),
    Mutant(
        name="fewer host lengths declared than needed",
        where="anyattn.core.step_checks:declared_traits",
        old="host_lengths=HostLengthNeed(row.host_lengths)",
        new="host_lengths=HostLengthNeed.NONE",
        names=("host-lengths",),
        report="vllm-ascend#16007",
    ),
    Mutant(
        name="padded rows left as they are",
        where=f"{_CONTRACT}._clear_padding",
        old="out[padding] = 0",
        new="pass",
        names=("padding",),
        report="vllm#37682",
    ),
    Mutant(
        name="stored although told not to",
        where=f"{_CONTRACT}._store",
        old='"save_kv_cache=False")\n        return False',
        new='"save_kv_cache=False")\n        self.write_kv(layer, plan.write_loc(group.table), k, v)\n'
        "        return False",
        names=("nothing stored", "KV source"),
    ),
    Mutant(
        name="out= ignored",
        where="anyattn.core.shapes:output_like",
        old="if out is None:",
        new="if True:",
        names=("out=", "given output"),
    ),
    Mutant(
        name="caller's K divided in place",
        where=f"{_SCALES}:quantize",
        old="x.float() / scale.column()",
        new="x.float().div_(scale.column())",
        names=("k was modified", "v was modified"),
    ),
    Mutant(
        name="scale dropped when stored",
        where=f"{_SCALES}:quantize",
        old="x.float() / scale.column()",
        new="x.float()",
        names=("scale",),
        report="sglang#28144",
    ),
    Mutant(
        name="fp8 overflows instead of saturating",
        where=f"{_SCALES}:quantize",
        old="scaled = scaled.clamp(-limit, limit)",
        new="scaled = scaled.clamp(-4 * limit, 4 * limit)",
        names=("saturat",),
    ),
    Mutant(
        name="HND written as its neighbour row",
        where="anyattn.core.kv.layouts:Axes._at",
        old="slots % page",
        new="(slots + 1) % page",
        names=("HND", "layout"),
        report="vllm#42740",
    ),
    Mutant(
        name="draft extend counts the prefix only",
        where="anyattn.core.batch_fields:batch_fields",
        old="seq = prefix + ext",
        new="seq = prefix + ext * (mode is not ForwardMode.DRAFT_EXTEND)",
        names=("draft",),
        report="sglang#26628",
    ),
)
