"""What FlashInfer's planners are given: decisions made from data, and host arrays that cost no copy back.

`plan` calls `.to("cpu")` on offsets and page lengths (decode.py, prefill.py of flashinfer-python 0.7.2): free
for CPU tensors, a stream sync for any other. Everything here is int32 on the CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import CapabilityRow
from anyattn.core.groups import PlanGroup, Space, TableGroup
from anyattn.core.plan import Plan, Table
from anyattn.core.strategy import Strategy
from anyattn.errors import HostLengthError

__all__ = [
    "HostArrays",
    "KeptPages",
    "PageArrays",
    "accepts",
    "inner_backend",
    "listed_tokens",
    "merge_fits",
    "uses_tensor_cores",
    "window_left",
    "workspace_bytes",
]

_CUDA_CORE_GROUPS = (1, 2, 3)
"""Query heads per KV head that the CUDA-core decode kernel is used for. It has 1, 2, 3, 4, 6, 8 and 16
(decode.cuh); from 4 on tensor cores win (SGLang's rule; on an H200 groups of 4 run at 4,261 GB/s)."""
_CUDA_CORE_DIMS = (64, 128, 256)
_TILE_ROWS = 128  # the largest query tile of the fa2 template
_BLOCKS_PER_SM = 2
_LEAST_WORKSPACE = 128 << 20  # FlashInfer's advice


def inner_backend(row: CapabilityRow) -> str:
    """The inner kernel of a row: `fa3` where its method says so, else the fa2 template."""
    return "fa3" if row.method.startswith("fa3") else "fa2"


def uses_tensor_cores(group: PlanGroup, num_q_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether decode runs the prefill template (tensor cores) or the CUDA-core kernel."""
    few = num_q_heads // group.num_kv_heads in _CUDA_CORE_GROUPS
    plain = kv_dtype == dtype and group.head_dim == group.v_head_dim and group.head_dim in _CUDA_CORE_DIMS
    return not (few and plain)


def window_left(window: int | None) -> int:
    """FlashInfer counts the keys left of the query: W - 1; -1 = no window."""
    return -1 if window is None else window - 1


def workspace_bytes(slots: tuple[tuple[PlanGroup, int], ...], device: torch.device) -> int:
    """Float workspace: partial outputs of split KV, the largest of all slots (`PrefillPlan`, scheduler.cuh).

    A split step has at most two blocks a multiprocessor; each writes a tile of rows for one KV head. 0.6
    reserves a tile for every query head of the group.
    """
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    tiles = [
        _BLOCKS_PER_SM * units * _TILE_ROWS * (heads // g.num_kv_heads) * (g.v_head_dim + 1) * 4
        for g, heads in slots
    ]
    return max([_LEAST_WORKSPACE, *tiles])


def merge_fits(num_heads: int, dim: int, itemsize: int) -> bool:
    """FlashInfer's merge runs one block per token: `dim / vec` threads a head, 1,024 in all (cascade.cuh)."""
    vec = max(16 // itemsize, dim // 32)
    return dim in (64, 128, 256, 512) and dim // vec * num_heads <= 1024


def accepts(function: Callable[..., Any], name: str) -> bool:
    """The installed version takes the keyword `name` (0.7's decode `plan` has `**kwargs`)."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


class HostArrays:
    """Offsets of one step on the host, each made once: of queries, and of every table that is planned."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._pages: dict[Table, PageArrays] = {}

    @cached_property
    def qo_indptr(self) -> torch.Tensor:
        """First query token of each request, `[B + 1]`."""
        exact = self._plan.batch.exact
        assert exact is not None  # the row asks for exact lengths; the contract has checked them
        indptr = torch.zeros(self._plan.key.num_requests + 1, dtype=torch.int32, device="cpu")
        torch.cumsum(exact.extend_lens, 0, dtype=torch.int32, out=indptr[1:])
        return indptr

    @cached_property
    def num_tokens(self) -> int:
        """Query tokens of requests: without the padding behind them."""
        key = self._plan.key
        return key.num_requests if key.mode is ForwardMode.DECODE else int(self.qo_indptr[-1])

    def pages(self, group: TableGroup, table: Table) -> PageArrays:
        """Of a group's table.

        Raises:
            HostLengthError: encoder lengths that only the device knows.
        """
        found = self._pages.get(table)
        if found is None:
            found = self._pages[table] = PageArrays(
                listed_tokens(self._plan, group, table), table.form.kernel_page
            )
        return found


def listed_tokens(plan: Plan, group: TableGroup, table: Table) -> torch.Tensor:
    """Tokens that a group's table lists for each request, on the host. Raises as `HostArrays.pages`."""
    exact = plan.batch.exact
    whole = group.window is None and group.space is not Space.ENCODER
    if whole and exact is not None and plan.strategy is not Strategy.RAGGED_MERGE:
        return exact.seq_lens
    host = table.host
    if host is None:
        raise HostLengthError(
            "flashinfer plans on the host and doesn't know the encoder lengths there",
            asked="encoder_lens on the device",
            allowed="encoder_lens as a list or a CPU tensor",
            hint="keep a copy of encoder_lens on the host",
        )
    return host.kv_lens


class PageArrays:
    """Offsets and lengths of a table on the host, from the tokens that it lists of each request.

    In numpy, which FlashInfer needs, too: for so few numbers it takes half of torch's time.

    Attributes:
        indptr: int32 `[B + 1]`, pages before each request. lens: int32 `[B]`, tokens.
    """

    def __init__(self, lens: torch.Tensor, page: int) -> None:
        """`lens`: integers `[B]` on the host; they aren't kept."""
        self._tokens = lens.numpy().astype("int32")
        self._counts = (self._tokens + (page - 1)) // page
        self._page = page
        self.indptr = torch.empty(lens.shape[0] + 1, dtype=torch.int32, device="cpu")
        offsets = self.indptr.numpy()
        offsets[0] = 0
        self._counts.cumsum(dtype="int32", out=offsets[1:])
        self.lens = torch.from_numpy(self._tokens)

    @cached_property
    def last(self) -> torch.Tensor:
        """int32 `[B]`, tokens in the last page. A request without keys has no page and 0 tokens in its last:
        `get_seq_lens` and the kernels' `get_length` then agree on 0."""
        counts = self._counts
        return torch.from_numpy(self._tokens - (counts - (counts > 0)) * self._page)


class KeptPages:
    """Offsets and lengths of one step after the other, of one number of requests, in the same memory.

    For native planners alone, which have read them when they return.

    Attributes:
        indptr, lens: as of `PageArrays`.
    """

    def __init__(self, requests: int, page: int) -> None:
        self.indptr = torch.zeros(requests + 1, dtype=torch.int32, device="cpu")
        self.lens = torch.zeros(requests, dtype=torch.int32, device="cpu")
        self._offsets, self._tokens = self.indptr.numpy(), self.lens.numpy()
        self._ends, self._kind = self._offsets[1:], self._tokens.dtype
        self._page, self._more = page, page - 1

    def take(self, lens: torch.Tensor) -> None:
        """`lens`: integers `[B]` on the host."""
        tokens = self._tokens
        tokens[:] = lens.numpy()
        ((tokens + self._more) // self._page).cumsum(dtype=self._kind, out=self._ends)

    def stamp(self, by_length: bool) -> bytes:
        """The offsets, and where asked for the lengths, as bytes: equal where they are."""
        stamp: bytes = self._offsets.tobytes()
        return stamp + self._tokens.tobytes() if by_length else stamp
