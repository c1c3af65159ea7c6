"""Entries with known outcomes, good and bad, for the tests of ahead-of-time compilation."""

# ruff: noqa: ANN001, ANN201  (inside a kernel, annotations mean constexpr to Triton)
from __future__ import annotations

import os
import time
from functools import partial

import torch
import triton
import triton.language as tl

from anyattn.kernels.triton.aot import Entry, Target
from anyattn.kernels.triton.launch import launch


@triton.jit
def product_kernel(a, b, c, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows, columns, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, n, BLOCK_K):
        left = tl.load(a + rows[:, None] * n + k + inner[None, :])
        right = tl.load(b + (k + inner)[:, None] * BLOCK_N + columns[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(c + rows[:, None] * BLOCK_N + columns[None, :], acc)


@triton.jit
def broken_kernel(a, n):
    tl.store(a + n, tl.load(no_such_name))  # noqa: F821


def product(
    m: int, n: int, k: int, target: Target, *, warps: int = 4, stages: int = 2, **options: int
) -> None:
    a, b = (torch.empty(s, 4096, dtype=torch.float16, device="meta") for s in (m, n))
    c = torch.empty(m, n, dtype=torch.float32, device="meta")
    constexprs = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}
    launch(product_kernel, (1,), (a, b, c, 4096), constexprs, num_warps=warps, num_stages=stages, **options)


def broken(target: Target) -> None:
    launch(broken_kernel, (1,), (torch.empty(4, device="meta"), 7), {})


def two_kernels(target: Target) -> None:
    broken(target)
    product(64, 64, 64, target)


def abort(target: Target) -> None:
    os.write(2, b"LLVM ERROR: sample\n")
    os.abort()


def hang(target: Target) -> None:
    time.sleep(600)


good = partial(product, 64, 64, 64)
narrow = partial(product, 128, 128, 64, maxnreg=32)

ENTRIES = (
    Entry("good", good, matrix=True),
    Entry("large", partial(product, 128, 128, 128, warps=8, stages=3), matrix=True),
    Entry("spilling", narrow, ("sm_80",), matrix=True),
    Entry("excused", narrow, ("sm_80",), matrix=True, spills={"sm_80": "asked for on purpose"}),
    Entry("broken", broken, ("sm_80",)),
    Entry("no-dots", partial(product, 64, 64, 64), ("sm_80",), kernel="product_kernel"),
    Entry("second", two_kernels, ("sm_80",), kernel="product_kernel", matrix=True),
    Entry("ambiguous", two_kernels, ("sm_80",)),
    Entry("aborting", abort, ("sm_80",), kernel="abort_kernel"),
    Entry("hanging", hang, ("sm_80",)),
)
