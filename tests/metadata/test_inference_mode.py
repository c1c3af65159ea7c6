"""Steps inside of inference mode and outside, in any order: what outlasts one can be written by both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

import anyattn
from anyattn.core.batch import ForwardBatch
from anyattn.core.contract import AttentionBackend
from anyattn.testing.emulators import emulating
from anyattn.testing.selecting import select_for

PAGE, ROWS, CONTEXT = 4, 4, 32
LIMITS = anyattn.Limits(ROWS, 64, CONTEXT)
NAMES = ("torch_native", "flashinfer", "fa3")


@contextmanager
def _made(name: str) -> Iterator[AttentionBackend]:
    with nullcontext() if name == "torch_native" else emulating(name):
        host = {} if name == "torch_native" else {"host": "cuda:sm90"}
        specs = [anyattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64)]
        decision = select_for(
            specs, device="cpu", dtype=torch.bfloat16, backend=name, page_size=PAGE, limits=LIMITS, **host
        )
        pool = anyattn.kv.create_pool(decision, num_slots=ROWS * CONTEXT)
        table = anyattn.kv.RequestTable(max_requests=ROWS, max_context=CONTEXT)
        slots = torch.arange(ROWS * CONTEXT, dtype=torch.int32) + PAGE
        table.req_to_token[:ROWS] = slots.view(ROWS, CONTEXT)
        backend = anyattn.create_backend(decision, pool, table)
        assert isinstance(backend, AttentionBackend)
        yield backend


def _decode(backend: AttentionBackend, *lens: int) -> ForwardBatch:
    slot = backend.table.req_to_token.tolist()
    return ForwardBatch.decode(
        list(range(len(lens))), list(lens), [slot[i][n - 1] for i, n in enumerate(lens)]
    )


def _extend(backend: AttentionBackend, prefix: int) -> ForwardBatch:
    return ForwardBatch.extend([2], [prefix], [2], backend.table.req_to_token[2, prefix : prefix + 2])


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_eager_steps_follow_each_other(name: str, first: bool) -> None:
    with _made(name) as backend:
        for step in range(6):
            with torch.inference_mode(first is (step % 2 == 0)):
                decode = backend.init_forward_metadata(_decode(backend, 5 + step, 9))
                again = backend.init_forward_metadata(_decode(backend, 4, 6 + step))
                extend = backend.init_forward_metadata(_extend(backend, step))
                assert decode.seq_lens.tolist() == [5 + step, 9]
                assert again.seq_lens.tolist() == [4, 6 + step]
                assert extend.prefix_lens.tolist() == [step]
            del decode, again, extend


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_step_takes_batches_of_both(name: str, inside: bool) -> None:
    with _made(name) as backend:
        with torch.inference_mode(inside):
            backend.init_cuda_graph_state(LIMITS)
            first = _decode(backend, 5, 6)
            captured = backend.init_forward_metadata_out_graph(first, in_capture=True)
            backend.init_forward_metadata_in_graph(captured)
        for mode in (not inside, inside):
            with torch.inference_mode(mode):
                later = _decode(backend, 9, 14)
                backend.init_forward_metadata_out_graph(later, captured=captured)
                backend.init_forward_metadata_in_graph(captured)
            assert captured.seq_lens.tolist() == [9, 14]
            assert captured.prefix_lens.tolist() == [8, 13]
