"""What the MLA adapters share: a latent pool as kernels take it, queries per request, queries in fp8."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from anyattn.core.batch import ForwardBatch, ForwardMode
from anyattn.core.contract import BackendConfig
from anyattn.core.dtypes import is_fp8
from anyattn.core.kv.pools.mla import MLAPool
from anyattn.core.plan import Plan
from anyattn.core.rows import dense
from anyattn.errors import BackendBuildError, FeatureError, PoolError

__all__ = [
    "LN2",
    "Latents",
    "arguments_of",
    "by_request",
    "function_of",
    "per_request",
    "repeat_last_page",
    "require_uniform",
    "saturated",
]

LN2 = math.log(2.0)
"""Base-2 log-sum-exp times this is the natural one."""


class Latents:
    """Views of a latent pool, made once a layer: `pages(layer)` is `[N, P, rank + rope]` of kernel pages.

    Attributes:
        fp8: latents are stored in 8 bits.
    """

    def __init__(self, config: BackendConfig) -> None:
        """Raises `PoolError` for a pool without latents."""
        pool = config.pool
        if not isinstance(pool, MLAPool):
            raise PoolError(
                f"{config.name} reads latent pools here", asked=type(pool).__name__, allowed="MLAPool"
            )
        self._pool, self._page = pool, config.form.kernel_page
        self._pages: dict[int, torch.Tensor] = {}
        self._scales: dict[int, float] = {}
        self.fp8 = is_fp8(pool.kv_dtype)

    def pages(self, layer_id: int) -> torch.Tensor:
        """`[N, P, rank + rope]`, a view of the storage."""
        view = self._pages.get(layer_id)
        if view is None:
            rows = self._pool.latent_cache(layer_id)
            view = self._pages[layer_id] = rows.view(-1, self._page, rows.shape[-1])
        return view

    def scale(self, layer_id: int) -> float:
        """The layer's KV scale on the host: K and V are one tensor."""
        value = self._scales.get(layer_id)
        if value is None:
            (value,) = self._pool.scales(layer_id)[0].host
            self._scales[layer_id] = value
        return value

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """q as the kernel takes it beside these latents: contiguous, in fp8 where they are."""
        return saturated(q, self._pool.kv_dtype) if self.fp8 else dense(q)


def by_request(x: torch.Tensor, each: int) -> torch.Tensor:
    """`[T, ...]` as `[B, each, ...]`, a view."""
    return x.view(-1, each, *x.shape[1:])


def saturated(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q in an 8-bit float with scale 1, clamped first: a plain cast makes NaN of what is too large."""
    limit = torch.finfo(dtype).max
    return q.clamp(-limit, limit).to(dtype).contiguous()


def per_request(plan: Plan) -> int | None:
    """Query tokens of every request, or None where requests differ (as far as the host knows)."""
    batch: ForwardBatch = plan.batch
    if plan.key.mode is ForwardMode.DECODE:
        return 1
    tokens, requests = plan.key.num_tokens, plan.key.num_requests
    if batch.exact is not None:
        same = bool((batch.exact.extend_lens == plan.max_q_len).all())
        return plan.max_q_len if same and plan.max_q_len * requests == tokens else None
    return plan.max_q_len if plan.max_q_len * requests == tokens else None


def repeat_last_page(plan: Plan) -> None:
    """Block tables' unused cells name the request's own last page; static shapes, no host sync.

    Kernels that load whole tiles of keys multiply what they hide by zero: the page there must be finite. Page
    0, where padding is written, needn't be.
    """
    for table in plan.tables.values():
        blocks, page = table.blocks, table.form.kernel_page
        last = ((table.kv_lens + (page - 1)) // page - 1).clamp_min(0)
        column = torch.arange(blocks.shape[1], device=blocks.device)
        blocks.copy_(blocks.gather(1, torch.minimum(column[None, :], last[:, None])))


def require_uniform(plan: Plan, name: str) -> int:
    """`per_request`, for kernels whose queries are `[B, q, Hq, D]`.

    Raises:
        FeatureError: requests of different lengths.
    """
    count = per_request(plan)
    if count is None:
        raise FeatureError(
            f"{name} reads as many query tokens of one request as of another",
            asked=plan.host_extend_lens
            or f"{plan.key.num_tokens} tokens of {plan.key.num_requests} requests",
            allowed="one length for all requests of a step, padding included",
            hint="pad drafts to one length, or verify with a backend that declares ragged_verify",
        )
    return count


def function_of(module: ModuleType, name: str, backend: str) -> Callable[..., Any]:
    """A function of a library.

    Raises:
        BackendBuildError: the installed version has none of that name.
    """
    found = getattr(module, name, None)
    if not callable(found):
        raise BackendBuildError(
            f"{backend} needs {module.__name__}.{name}",
            asked=f"{module.__name__} {getattr(module, '__version__', '')}".strip(),
            allowed=f"a version that has {name}",
            hint="`anyattn doctor` says which versions serve",
        )
    function: Callable[..., Any] = found
    return function


def arguments_of(function: Callable[..., Any], *needed: str, backend: str) -> frozenset[str]:
    """Names of a library function's parameters: versions are told apart by them.

    Raises:
        BackendBuildError: one that the adapter can't do without is missing.
    """
    names = frozenset(inspect.signature(function).parameters)
    missing = sorted(set(needed) - names)
    if missing:
        raise BackendBuildError(
            f"{function.__module__}.{function.__name__} lacks what {backend} passes",
            asked=", ".join(missing),
            allowed=", ".join(sorted(names)),
            hint="`anyattn doctor` says which versions serve; some libraries import as stubs",
        )
    return names
