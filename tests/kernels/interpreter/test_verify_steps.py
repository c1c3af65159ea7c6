"""Which steps of the backend have their keys cut, and that nothing else changes."""

from collections.abc import Iterator

import pytest
import torch

import anyattn
from anyattn.backends.portable import triton_verify
from anyattn.kernels.triton.launch import set_hook
from anyattn.testing.interpreter import offer_triton

PREFIX, CONTEXT = [60, 3, 41], 72


@pytest.fixture(autouse=True, scope="module")
def _on_this_cpu() -> None:
    offer_triton()


@pytest.fixture
def launched() -> Iterator[list[str]]:
    seen: list[str] = []
    previous = set_hook(lambda kernel, *_: bool(seen.append(kernel.__name__)))
    yield seen
    set_hook(previous)


class Served:
    """Two layers of one plan group, one with half the query heads, and cached tokens."""

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        specs = [anyattn.AttentionSpec(num_q_heads=n, num_kv_heads=2, head_dim=16) for n in (4, 2)]
        decision = anyattn.select(
            specs, dtype=torch.float32, device="cpu", backend="triton", page_size=4, **options
        )
        self.pool = anyattn.kv.create_pool(decision, num_slots=4 * CONTEXT)
        self.table = anyattn.kv.RequestTable(max_requests=4, max_context=CONTEXT)
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        self.layers = [anyattn.AttentionLayer(spec, i) for i, spec in enumerate(specs)]
        pages = torch.randperm(4 * CONTEXT // 4) + 1
        self.table.req_to_token[:4] = (pages[:, None] * 4 + torch.arange(4)).view(4, CONTEXT).int()
        for i in range(2):
            self.pool.key_cache(i).normal_()
            self.pool.value_cache(i).normal_()
        self.k, self.v = (torch.randn(40, 2, 16) for _ in range(2))
        self.q = torch.randn(40, 4, 16)

    def run(self, prefix: list[int], new: list[int], layer: int = 0) -> torch.Tensor:
        pairs = enumerate(zip(prefix, new, strict=True))
        loc = torch.cat([self.table.req_to_token[r, p : p + n] for r, (p, n) in pairs]).long()
        batch = anyattn.ForwardBatch.verify(list(range(len(new))), prefix, new, loc)
        tokens, heads = sum(new), self.layers[layer].spec.num_q_heads
        inputs = self.q[:tokens, :heads], self.k[:tokens], self.v[:tokens]
        with anyattn.forward_context(self.backend, self.backend.init_forward_metadata(batch)):
            out = self.layers[layer](*inputs, batch)
        assert isinstance(out, torch.Tensor)
        return out


def test_long_chains_are_cut_and_short_ones_are_not(launched: list[str]) -> None:
    served = Served()
    served.run(PREFIX, [3, 5, 1])
    assert launched[-2:] == ["verify_kernel", "merge_verify_kernel"]
    served.run([9, 3], [3, 5])
    assert launched[-1] == "extend_kernel"
    served.run([30], [40])  # more rows than the table's
    assert launched[-1] == "extend_kernel"


def test_what_is_cut_is_the_same(monkeypatch: pytest.MonkeyPatch, launched: list[str]) -> None:
    cut = Served().run(PREFIX, [3, 5, 1])
    assert "extend_kernel" not in launched
    monkeypatch.setattr(triton_verify, "choose_verify", lambda *_, **__: None)
    whole = Served().run(PREFIX, [3, 5, 1])
    assert launched[-1] == "extend_kernel"
    torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-5)


def test_layers_with_other_heads_than_the_plan_are_extended(launched: list[str]) -> None:
    served = Served()
    served.run(PREFIX, [3, 5, 1], layer=1)
    assert launched[-1] == "extend_kernel"


def test_batch_invariant_rows_are_never_cut(launched: list[str]) -> None:
    Served(deterministic="batch-invariant").run(PREFIX, [3, 5, 1])
    assert launched[-1] == "extend_kernel"
    assert "verify_kernel" not in launched
