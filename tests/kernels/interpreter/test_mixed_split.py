"""Requests with few query rows beside others with many: each kernel's rows, and which steps are split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn.kernels.triton.launch import set_hook
from anyattn.testing.interpreter import offer_triton

CONTEXT = 160
CHUNK_LAST = [(70, 1), (41, 1), (0, 1), (130, 3), (16, 1), (9, 40), (0, 33)]
MIXED = [(9, 40), (0, 33), (70, 1), (0, 1), (41, 1), (130, 1), (15, 1)]
BETWEEN = [(31, 8), (60, 1), (17, 20), (32, 2), (0, 0), (90, 9), (0, 8), (63, 1)]
"""Eight tokens of a group of two are 16 rows; nine are more."""


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
    """A layer on shuffled pages; slots that nobody owns hold NaN."""

    def __init__(
        self, *, sinks: bool = False, page: int = 4, deterministic: str = "none", **spec: Any
    ) -> None:
        torch.manual_seed(0)
        heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} | spec
        self.spec = anyattn.AttentionSpec(**heads, sinks=sinks)
        decision = anyattn.select(
            [self.spec],
            dtype=torch.float32,
            device="cpu",
            backend="triton",
            page_size=page,
            deterministic=deterministic,
        )
        self.pool = anyattn.kv.create_pool(decision, num_slots=10 * CONTEXT)
        self.table = anyattn.kv.RequestTable(max_requests=10, max_context=CONTEXT)
        self.backend = anyattn.create_backend(decision, self.pool, self.table)
        logits = torch.linspace(-1, 2, heads["num_q_heads"]) if sinks else None
        self.layer = anyattn.AttentionLayer(self.spec, 0, sinks=logits)
        pages = torch.randperm(10 * CONTEXT // page) + 1
        self.table.req_to_token[:10] = (pages[:, None] * page + torch.arange(page)).view(10, CONTEXT).int()
        self.k, self.v = (torch.randn(200, heads["num_kv_heads"], 16) for _ in range(2))
        self.q = torch.randn(200, heads["num_q_heads"], 16)

    def run(
        self, requests: list[tuple[int, int]], *, mixed: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cached = [self.pool.key_cache(0), self.pool.value_cache(0)]
        for each in cached:
            each.fill_(torch.nan)
        flat = [each.view(-1, *each.shape[2:]) for each in cached]
        torch.manual_seed(1)
        loc = []
        for row, (prefix, new) in enumerate(requests):
            own = self.table.req_to_token[row].long()
            for each in flat:
                each[own[:prefix]] = torch.randn(prefix, *each.shape[1:])
            loc.append(own[prefix : prefix + new])
        prefixes, news = (list(each) for each in zip(*requests, strict=True))
        make = anyattn.ForwardBatch.mixed if mixed else anyattn.ForwardBatch.extend
        batch = make(list(range(len(news))), prefixes, news, torch.cat(loc))
        inputs = (x[: sum(news)] for x in (self.q, self.k, self.v))
        with anyattn.forward_context(self.backend, self.backend.init_forward_metadata(batch)):
            out, lse = self.layer(*inputs, batch, return_lse=True)
        return out, lse

    def reference(self, requests: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """After `run`: everything is in the pool."""
        flat = [x.view(-1, *x.shape[2:]).double() for x in (self.pool.key_cache(0), self.pool.value_cache(0))]
        outs, lses, at = [], [], 0
        group = self.spec.num_q_heads // self.spec.num_kv_heads
        for row, (prefix, new) in enumerate(requests):
            own = self.table.req_to_token[row, : prefix + new].long()
            k, v = (x[own].repeat_interleave(group, 1) for x in flat)
            logits = torch.einsum("thd,nhd->htn", self.q[at : at + new].double(), k) * self.spec.scale
            if self.spec.logit_cap is not None:
                logits = self.spec.logit_cap * torch.tanh(logits / self.spec.logit_cap)
            gap = prefix + torch.arange(new)[:, None] - torch.arange(prefix + new)[None]
            seen = gap >= 0
            if self.spec.sliding_window is not None:
                seen &= gap < self.spec.sliding_window
            logits = logits.masked_fill(~seen, -torch.inf)
            if self.layer.sinks is not None:
                logits = torch.cat([logits, self.layer.sinks.double()[:, None, None].expand(-1, new, 1)], 2)
            outs.append(torch.einsum("htn,nhd->thd", torch.softmax(logits, -1)[..., : prefix + new], v))
            lses.append(torch.logsumexp(logits, -1).T)
            at += new
        return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("requests", [CHUNK_LAST, BETWEEN], ids=["chunks last", "in any order"])
@pytest.mark.parametrize(
    "asked",
    [{}, {"sliding_window": 20, "page": 16}, {"sinks": True, "logit_cap": 3.0, "num_q_heads": 14}],
    ids=["plain", "window", "sinks, cap, group of 7"],
)
def test_both_kernels_write_their_rows(requests: list[tuple[int, int]], asked: dict[str, Any]) -> None:
    served = Served(**asked)
    seen: list[str] = []
    previous = set_hook(lambda kernel, *_: bool(seen.append(kernel.__name__)))
    try:
        got = served.run(requests)
    finally:
        set_hook(previous)
    assert {"few_keys_kernel", "verify_kernel", "merge_verify_kernel"} <= set(seen)
    assert seen[-1] == ("extend_tma_kernel" if "page" in asked else "extend_kernel")
    for ours, wanted in zip(got, served.reference(requests), strict=True):
        torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=2e-5)


def test_a_mixed_step_is_split(launched: list[str]) -> None:
    served = Served()
    got = served.run(MIXED, mixed=True)
    assert launched[-3:] == ["verify_kernel", "merge_verify_kernel", "extend_kernel"]
    for ours, wanted in zip(got, served.reference(MIXED), strict=True):
        torch.testing.assert_close(ours.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("requests", "split"),
    [
        ([(70, 1), (41, 1), (9, 40)], True),
        ([(5, 40), (100, 33)], False),  # no request with few rows
        ([(150, 1), (0, 100)], True),
    ],
)
def test_which_steps_are_split(requests: list[tuple[int, int]], split: bool, launched: list[str]) -> None:
    Served().run(requests)
    assert launched[-1] == "extend_kernel"
    assert ("verify_kernel" in launched) is split


def test_wide_groups_are_not_split(launched: list[str]) -> None:
    Served(num_q_heads=34, num_kv_heads=2).run([(70, 1), (41, 1), (9, 40)])
    assert "verify_kernel" not in launched


def test_batch_invariant_rows_stay_in_one_kernel(launched: list[str]) -> None:
    Served(deterministic="batch-invariant").run(MIXED, mixed=True)
    assert launched[-1] == "extend_kernel"
    assert "few_keys_kernel" not in launched
