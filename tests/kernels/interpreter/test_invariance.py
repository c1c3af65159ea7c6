"""Batch invariance of the Triton backend: alone = batched = re-chunked, bit for bit (interpreter)."""

import random

import pytest
import torch

import anyattn
from anyattn.testing.interpreter import offer_triton

LENGTH, HEADS, KV_HEADS, DIM = 75, 4, 2, 16


@pytest.fixture(autouse=True, scope="module")
def _on_this_cpu() -> None:
    offer_triton()


class Served:
    """One model layer with `rows` requests of the same tokens' KV at hand."""

    def __init__(self, window: int | None, deterministic: str | None) -> None:
        self.spec = anyattn.AttentionSpec(
            num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, sliding_window=window
        )
        decision = anyattn.select(
            self.spec, dtype=torch.float32, device="cpu", backend="triton", page_size=4,
            deterministic=deterministic, features=["lse"],
        )  # fmt: skip
        self.pool = anyattn.kv.create_pool(decision, num_slots=4 * 200)
        self.table = anyattn.kv.RequestTable(max_requests=8, max_context=LENGTH + 5)
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        self.layer = anyattn.AttentionLayer(self.spec, 0)
        self.free = random.Random(1).sample(range(1, 200), 199)

    def request(self, row: int, length: int = LENGTH) -> None:
        """Give a request its slots, pages in any order."""
        pages = [self.free.pop() for _ in range(-(-length // 4))]
        slots = [p * 4 + i for p in pages for i in range(4)][:length]
        self.table.req_to_token[row, :length] = torch.tensor(slots, dtype=torch.int32)

    def step(
        self, rows: list[int], prefix: list[int], extend: list[int], qkv: list[torch.Tensor]
    ) -> torch.Tensor:
        """Output of the step's tokens; `qkv [tokens, …]` of all requests, one after another."""
        loc = torch.cat(
            [self.table.req_to_token[r, p : p + e] for r, p, e in zip(rows, prefix, extend, strict=True)]
        )
        if set(extend) == {1}:
            batch = anyattn.ForwardBatch.decode(rows, [p + 1 for p in prefix], loc.long())
        else:
            batch = anyattn.ForwardBatch.extend(rows, prefix, extend, loc.long())
        plan = self.backend.init_forward_metadata(batch)
        with anyattn.forward_context(self.backend, plan):
            out, lse = self.layer(*qkv, batch, return_lse=True)
        return torch.cat((out.flatten(1), lse), 1)


def tokens(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(count, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)]


def in_chunks(served: Served, row: int, chunks: list[int], qkv: list[torch.Tensor]) -> torch.Tensor:
    served.request(row)
    parts, done = [], 0
    for chunk in chunks:
        part = [x[done : done + chunk] for x in qkv]
        parts.append(served.step([row], [done], [chunk], part))
        done += chunk
    return torch.cat(parts)


@pytest.mark.parametrize("window", [None, 7, 33])
def test_alone_batched_and_rechunked_are_the_same_bits(window: int | None) -> None:
    served, qkv = Served(window, "batch-invariant"), tokens(LENGTH)
    whole = in_chunks(served, 0, [LENGTH], qkv)
    for row, chunks in enumerate(([17, 30, 28], [64, 9, 1, 1], [1, 40, 33, 1]), start=1):
        assert torch.equal(in_chunks(served, row, chunks, qkv), whole), chunks
    other = [torch.randn(13, *x.shape[1:]) for x in qkv]
    served.request(5, 13)
    served.request(6)
    both = [torch.cat((a, b)) for a, b in zip(other, qkv, strict=True)]
    assert torch.equal(served.step([5, 6], [0, 0], [13, LENGTH], both)[13:], whole)


def test_without_the_request_decode_may_split() -> None:
    """The ordinary mode splits a lone request's keys over programs: close, not equal by construction."""
    served, qkv = Served(None, None), tokens(LENGTH)
    whole = in_chunks(served, 0, [LENGTH], qkv)
    stepped = in_chunks(served, 1, [LENGTH - 1, 1], qkv)
    torch.testing.assert_close(stepped, whole)
    assert served.backend.config.deterministic.name == "NONE"
