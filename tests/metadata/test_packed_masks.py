"""Mask bits for kernels that read eight cells a byte, against a loop over cells."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.core.groups import GroupSet, TableGroup
from anyattn.core.kv import MHAPool
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.metadata.packed_masks import pack_mask
from anyattn.core.plan import TableForm, TableKind

PREFIX, DRAFTS = (21, 3, 8), (5, 2, 3)


@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("page", [1, 4])
def test_bits_are_the_masks_cells_in_the_window(window: int | None, page: int) -> None:
    spec = anyattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8, sliding_window=window)
    pool = MHAPool([spec], num_slots=128, page_size=4, kv_dtype=torch.float32, dtype=torch.float32)
    table = anyattn.kv.RequestTable(max_requests=4, max_context=40)
    for row in range(3):
        table.req_to_token[row, :32] = torch.arange(4 + 32 * row, 36 + 32 * row)
    compiler = MetadataCompiler(
        GroupSet.from_specs([spec]), TableForm(TableKind.PAGE_CSR, kernel_page=page), pool, table, owner=1
    )
    torch.manual_seed(3)
    masks = [torch.rand(d, p + d) < 0.7 for p, d in zip(PREFIX, DRAFTS, strict=True)]
    positions = [p + int(n) for p, d in zip(PREFIX, DRAFTS, strict=True) for n in torch.randint(0, 3, (d,))]
    slots = [
        4 + 32 * r + p + i for r, (p, d) in enumerate(zip(PREFIX, DRAFTS, strict=True)) for i in range(d)
    ]
    batch = anyattn.ForwardBatch.verify(
        [0, 1, 2], PREFIX, DRAFTS, slots, mask=anyattn.ExplicitMask.from_matrices(masks), positions=positions
    )
    plan = compiler.prepare(batch)
    compiler.fill(plan)
    made = plan.tables[TableGroup(window=window)]
    sizes = [d * int(n) for d, n in zip(DRAFTS, made.kv_lens, strict=True)]
    bits = torch.full((sum(sizes),), 255, dtype=torch.uint8)
    pack_mask(plan, made, window, bits)

    first, token = 0, 0
    for mask, prefix, drafts, start, size in zip(masks, PREFIX, DRAFTS, made.kv_start, sizes, strict=True):
        own, columns = positions[token : token + drafts], size // drafts
        for row in range(drafts):
            for column in range(columns):
                key = int(start) + column
                stands = key if key < prefix else own[key - prefix]
                seen = bool(mask[row, key]) and (window is None or stands > own[row] - window)
                cell = row * columns + column
                assert bool(bits[first + cell // 8] >> (cell % 8) & 1) == seen, (row, key)
        assert not bool(bits[first + -(-size // 8) : first + size].any()), "bytes behind stay zero"
        first, token = first + size, token + drafts
