"""Steps in parts by a kernel that reads the listed blocks alone, as a GPU's does.

On a CPU FlexAttention is eager and never looks at the lists, so that one which lacks a block, or names it
twice, would first be seen on a GPU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from anyattn.backends.portable import flex_attention
from anyattn.backends.portable.flex_kernel import Kernel, Specialisation
from anyattn.testing.builder import build_step
from anyattn.testing.cases import Case
from anyattn.testing.judge import Report, judge, run_step
from anyattn.testing.world import World

HOST = "cuda:sm90"
SHAPE: dict[str, Any] = {
    "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64, "dtype": "float16",
    "kv_dtype": "float16", "slot_layout": "shuffled_pages", "seed": 5,
}  # fmt: skip
FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "k_scale": 2.0, "page_size": 16}
STEPS: dict[str, dict[str, Any]] = {
    "decode": {"mode": "decode", "prefix_lens": (3, 383, 128, 255), "extend_lens": (1,) * 4, "padding": 2},
    "prefill": {"prefix_lens": (0, 200, 31, 256), "extend_lens": (300, 1, 140, 0)},
    "bidirectional": {"kind": "bidirectional", "prefix_lens": (130, 0), "extend_lens": (170, 40)},
    "mixed": {"mode": "mixed", "prefix_lens": (5, 340, 9), "extend_lens": (150, 1, 1), "num_decode": 2},
    "verify": {"mode": "verify", "prefix_lens": (254, 127), "extend_lens": (5, 3)},
    "encoder": {"kind": "encoder_only", "prefix_lens": (0, 0), "extend_lens": (7, 300), "kv": "arguments"},
}
FORMS: dict[str, dict[str, Any]] = {"pages": {"page_size": 32}, "whole parts": {"page_size": 128}, "fp8": FP8}


@pytest.fixture(autouse=True)
def _parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 keys; batches of one are avoided as on a GPU."""
    make = flex_attention.FlexAttention.__init__

    def init(self: Any, config: Any) -> None:
        make(self, config)
        self._least = 2

    monkeypatch.setattr(flex_attention, "_PART", 128)
    monkeypatch.setattr(flex_attention, "compiled", listed)
    monkeypatch.setattr(flex_attention.FlexAttention, "__init__", init)


@pytest.mark.parametrize("window", [None, 3, 150])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", STEPS)
def test_every_key_is_listed_in_one_part_once(name: str, form: str, window: int | None) -> None:
    report = _report(name, form, window=window, sinks=True, logit_cap=20.0)
    assert report.passed, str(report)


@pytest.mark.parametrize("harm", ["lacks", "twice", "unmasked"])
def test_a_wrong_list_is_seen(harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = flex_attention.block_lists

    def harmed(*arguments: Any) -> Any:
        blocks = original(*arguments)
        (counts, entries), (full_counts, full) = blocks.partial, blocks.full
        if harm == "lacks":
            full_counts.sub_(1).clamp_(min=0)
        elif harm == "twice":
            counts.copy_((counts + full_counts).clamp_max(entries.shape[-1]))
            entries.copy_(full)
        else:
            full.copy_(entries)
            full_counts.copy_(counts)
        return blocks

    assert _report("prefill", "pages").passed
    monkeypatch.setattr(flex_attention, "block_lists", harmed)
    assert not _report("prefill", "pages").passed


def _report(name: str, form: str, **fields: Any) -> Report:
    world = World(
        Case(**{**SHAPE, **STEPS[name], **FORMS[form], **fields}), backend="flex_attention", host=HOST
    )
    return judge(run_step(build_step(world)))


def listed(spec: Specialisation) -> Kernel:
    """The kernel's sums in float64, over the blocks that its lists name and no others."""

    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scales: torch.Tensor,
        caps: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        tiles, heads, rows, _ = q.shape
        out = q.new_zeros(tiles, heads, rows, v.shape[3], dtype=torch.float64)
        lse = torch.full((tiles, heads, rows), -math.inf, dtype=torch.float64)
        for tile in range(tiles):
            keys, values = (
                x[tile % x.shape[0]].repeat_interleave(heads // x.shape[1], 0).double() for x in (k, v)
            )
            for span, first in enumerate(range(0, rows, spec.blocks[0])):
                row = torch.arange(first, min(rows, first + spec.blocks[0]))
                key, whole = _listed_keys(mask, tile, span, spec.blocks[1], k.shape[2])
                logits = q[tile, :, row].double() @ keys[:, key].mT * scales.double()[:, None, None]
                if caps is not None:
                    logits = caps.double()[:, None, None] * (logits / caps.double()[:, None, None]).tanh()
                at = torch.full((len(row), len(key)), tile)
                seen = mask.mask_mod(at, torch.zeros_like(at), row[:, None], key[None, :]) | whole
                logits = logits.masked_fill(~seen, -math.inf)
                lse[tile, :, row] = logits.logsumexp(2)
                weights = (logits - lse[tile, :, row].clamp_min(-1e30)[..., None]).exp()
                out[tile, :, row] = weights @ values[:, key]
        return out.to(q.dtype), lse.float()

    return kernel


def _listed_keys(mask: Any, tile: int, span: int, block: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns `[n]` of a span's blocks, those behind the last key left out, and which need no mask."""
    lists = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
    found = [entries[tile, 0, span, : int(counts[tile, 0, span])] for counts, entries in lists]
    columns = torch.cat(found).long()[:, None] * block + torch.arange(block)
    whole = (torch.arange(len(columns)) >= len(found[0]))[:, None].expand_as(columns)
    inside = columns < keys
    return columns[inside], whole[inside]
