"""Random steps for the metadata kernel, and the comparison with `MetadataCompiler.fill`, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from anyattn.core.batch import ForwardBatch, UpperBound
from anyattn.core.groups import GroupSet
from anyattn.core.kv import MHAPool, RequestTable
from anyattn.core.metadata.buffers import StepBuffers
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import Plan, TableForm, TableKind
from anyattn.core.spec import AttentionKind, AttentionSpec, Limits
from anyattn.kernels.triton.metadata_launch import FusedFiller

UNWRITTEN = -77

FORMS = [
    TableForm(TableKind.TOKEN_CSR, index_dtype=torch.int64),
    TableForm(TableKind.TOKEN_CSR, index_slack=21, fill=3),
    TableForm(TableKind.PAGE_CSR, kernel_page=4, index_slack=1),
    TableForm(TableKind.PAGE_CSR, kernel_page=16, fill=-1),
    TableForm(TableKind.BLOCK_TABLE, kernel_page=16, fill=-1, width_multiple=4),
    TableForm(TableKind.BLOCK_TABLE, kernel_page=1, fill=5, index_dtype=torch.int64),
    TableForm(TableKind.REQUEST_TABLE),
]


SMALL = Limits(max_requests=6, max_tokens=256, max_context=64)


def compiler(
    form: TableForm, specs: list[AttentionSpec], limits: Limits = SMALL, device: str = "cpu"
) -> MetadataCompiler:
    """A compiler whose request table holds arbitrary numbers: what is compared is arithmetic."""
    pool = MHAPool(
        specs, num_slots=64, page_size=16, kv_dtype=torch.float32, dtype=torch.float32, device=device
    )
    table = RequestTable(
        max_requests=limits.max_requests,
        max_context=limits.max_context,
        max_encoder=limits.max_context - 24,
        device=device,
    )
    made = MetadataCompiler(GroupSet.from_specs(specs), form, pool, table, owner=1)
    made.checks = "off"
    return made


def spec(window: int | None = None, kind: AttentionKind = AttentionKind.CAUSAL) -> AttentionSpec:
    return AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, sliding_window=window, kind=kind)


def fill_table(table: RequestTable, rng: random.Random) -> None:
    """Random slots, a third of them negative: a page number is rounded down, not towards zero."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    assert table.encoder_to_token is not None
    for cells in (table.req_to_token, table.encoder_to_token):
        cells.copy_(torch.randint(-500, 1000, cells.shape, generator=generator))


def lengths(rng: random.Random, count: int, longest: int) -> tuple[list[int], list[int]]:
    """Prefix and extend lengths around page and chunk edges, empty ones among them."""
    seq = [rng.choice([0, 1, 15, 16, 17, 33, rng.randint(1, longest), longest]) for _ in range(count)]
    extend = [rng.choice([min(1, n), n, rng.randint(0, n)]) for n in seq]
    return [s - e for s, e in zip(seq, extend, strict=True)], extend


def random_batch(
    table: RequestTable, rng: random.Random, count: int, *, exact: bool, encoder: bool = False
) -> ForwardBatch:
    """An extend of `count` requests in random rows, sometimes with padding tokens."""
    prefix, extend = lengths(rng, count, table.max_context)
    padding = rng.choice([0, 3])
    rows = rng.sample(range(table.max_requests + 1), count)
    batch = ForwardBatch.extend(
        rows,
        prefix,
        extend,
        list(range(sum(extend) + padding)),
        encoder_lens=[rng.randint(0, table.max_encoder) for _ in rows] if encoder else None,
        num_padding_tokens=padding,
    )
    return batch if exact else batch.view(host_lens=UpperBound(table.max_context, table.max_context))


def bounded_decode(table: RequestTable, rng: random.Random, count: int = 24) -> ForwardBatch:
    """A decode step as a graph captures it: no size follows a length.

    Decoder lengths are bounded and encoder lengths stand on the device, so tables are as large as the
    bounds make them, whatever the lengths. With encoder lengths on the host they'd be sized for this step.
    """
    rows = rng.sample(range(table.max_requests), count)
    seq = [rng.randint(1, table.max_context) for _ in rows]
    encoder = torch.tensor(
        [rng.randint(0, table.max_encoder) for _ in rows], dtype=torch.int64, device=table.req_to_token.device
    )
    batch = ForwardBatch.decode(rows, seq, list(range(count)), encoder_lens=encoder)
    return batch.view(host_lens=UpperBound(table.max_context))


def outputs(plan: Plan) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that `fill` writes."""
    yield "prefix_lens", plan.prefix_lens
    yield "query_offsets", plan.query_offsets
    yield "positions", plan.positions
    for index, table in enumerate(plan.tables.values()):
        for name in ("kv_start", "kv_lens", "indptr", "indices", "last_page_len", "block_table"):
            tensor = getattr(table, name)
            if tensor is not None:
                yield f"{name}.{index}", tensor


def poison(plan: Plan) -> None:
    """Mark every cell that `fill` must write."""
    for name, tensor in outputs(plan):
        if name != "positions" or plan.batch.positions is None:
            tensor.fill_(UNWRITTEN)


def filled(
    made: MetadataCompiler, batch: ForwardBatch, fused: FusedFiller | None, buffers: StepBuffers | None = None
) -> Plan:
    """A plan whose every cell was poisoned before `fill`."""
    plan = made.prepare(batch, buffers)
    poison(plan)
    made.filler = fused
    made.fill(plan)
    return plan


def assert_equal(want: Plan, got: Plan) -> None:
    """Every output, every bit."""
    for (name, a), (_, b) in zip(outputs(want), outputs(got), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if not torch.equal(a, b):
            at = (a != b).nonzero()[0].tolist()
            raise AssertionError(f"{name} at {at}: want {a[tuple(at)]}, got {b[tuple(at)]}; {tuple(a.shape)}")


def assert_same(
    made: MetadataCompiler, batch: ForwardBatch, fused: FusedFiller, buffers: Limits | None = None
) -> Plan:
    """The kernel's plan, compared with the compiler's own; with `buffers`, both live in step buffers."""
    plans = []
    for filler in (None, fused):
        storage = None if buffers is None else StepBuffers(buffers, made.form, made.device)
        plans.append(filled(made, batch, filler, storage))
    assert_equal(*plans)
    return plans[1]
