"""The fused metadata kernel on a GPU: same bits as the compiler's own `fill`, no sync, graph-safe."""

import random
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="the portable extra isn't installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from metadata_cases import (
    FORMS,
    assert_equal,
    assert_same,
    bounded_decode,
    compiler,
    fill_table,
    poison,
    random_batch,
    spec,
)

from anyattn.core.batch import ForwardBatch
from anyattn.core.metadata.buffers import StepBuffers
from anyattn.core.metadata.compiler import MetadataCompiler
from anyattn.core.plan import TableForm
from anyattn.core.spec import AttentionKind, Limits
from anyattn.kernels.triton.metadata_launch import FusedFiller

LIMITS = Limits(max_requests=256, max_tokens=1 << 17, max_context=6000)
GROUPS = [spec(), spec(1000), spec(kind=AttentionKind.CROSS)]


@pytest.fixture(params=FORMS, ids=lambda f: f"{f.kind.value}-{f.kernel_page}")
def made(request: pytest.FixtureRequest) -> MetadataCompiler:
    return compiler(request.param, GROUPS, LIMITS, "cuda")


def test_equal_on_the_device(made: MetadataCompiler) -> None:
    rng = random.Random(str(made.form))
    fused = FusedFiller(made.table)
    for step in range(40):
        if step % 10 == 0:
            fill_table(made.table, rng)
        count = rng.choice([1, 2, 7, 16, 40])
        batch = random_batch(made.table, rng, count, exact=step % 2 == 0, encoder=True)
        assert_same(made, batch, fused)


def test_thousands_of_requests() -> None:
    """More requests than one masked sum covers."""
    limits = Limits(max_requests=5000, max_tokens=5000, max_context=300)
    rng = random.Random(2)
    made = compiler(FORMS[2], [spec(), spec(33)], limits, "cuda")
    fill_table(made.table, rng)
    seq = [rng.randint(1, limits.max_context) for _ in range(4321)]
    batch = ForwardBatch.decode(list(range(4321)), seq, list(range(4321)))
    assert_same(made, batch, FusedFiller(made.table))


@pytest.fixture
def no_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_no_sync_no_allocation_and_replay_follows_the_lengths(made: MetadataCompiler, no_sync: None) -> None:
    rng = random.Random(3)
    fill_table(made.table, rng)
    buffers = StepBuffers(LIMITS, made.form, made.device)
    fused = FusedFiller(made.table)
    captured = made.prepare(bounded_decode(made.table, rng), buffers)
    fused(captured)  # compiled outside the capture
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    fused(captured)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused(captured)
    for _ in range(5):
        batch = bounded_decode(made.table, rng)
        made.prepare(batch, buffers)  # new lengths at the captured addresses
        poison(captured)
        graph.replay()
        made.filler = None
        want = made.prepare(batch)
        made.fill(want)
        assert_equal(want, captured)


def test_a_form_with_its_own_fill() -> None:
    form = TableForm(FORMS[3].kind, kernel_page=16, fill=-1, index_slack=5000, index_dtype=torch.int64)
    made = compiler(form, GROUPS[:1], LIMITS, "cuda")
    rng = random.Random(4)
    fill_table(made.table, rng)
    assert_same(made, random_batch(made.table, rng, 9, exact=False), FusedFiller(made.table))
