"""A cell: one attention step of one shape, what it moves and computes, and how it is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import anyattn
from anyattn.bench.harness.candidate import Work
from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import Phase
from anyattn.core.measure.bucket import Role

__all__ = ["Cell", "Step"]

Step = Literal["decode", "extend", "mixed", "verify"]
"""Which `ForwardBatch` a cell is."""

_MODES: dict[Step, ForwardMode] = {
    "decode": ForwardMode.DECODE,
    "extend": ForwardMode.EXTEND,
    "mixed": ForwardMode.MIXED,
    "verify": ForwardMode.TARGET_VERIFY,
}
_PHASES: dict[Step, Phase] = {
    "decode": Phase.DECODE,
    "extend": Phase.PREFILL,
    "mixed": Phase.PREFILL,
    "verify": Phase.VERIFY,
}
_ROLES: dict[Step, Role] = {
    "decode": Role.DECODE,
    "extend": Role.PREFILL,
    "mixed": Role.MIXED,
    "verify": Role.VERIFY,
}
_LATENT = (576, 512)


@dataclass(frozen=True)
class Cell:
    """One step of one layer.

    Attributes:
        workload, name: for a reader and for `--cells`. step: the kind of batch.
        prefixes, news: cached and new tokens of each request.
        num_q, num_kv, dim, v_dim: heads of one rank; 1 KV head of 576 and 512 is absorbed MLA.
        page: tokens in a page of the pool that backends share; peers choose their own.
        window: keys that a query sees, its own included.
        modes: of "graph" and "eager". worth: 1 is run first. weight: steps of a replay that it stands for.
    """

    workload: str
    step: Step
    prefixes: tuple[int, ...]
    news: tuple[int, ...]
    num_q: int = 32
    num_kv: int = 8
    dim: int = 128
    v_dim: int = 128
    page: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    window: int | None = None
    modes: tuple[str, ...] = field(default=("eager",), compare=False)
    worth: int = field(default=2, compare=False)
    quick: bool = field(default=False, compare=False)
    weight: float = field(default=1.0, compare=False)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.prefixes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """KV tokens of each request, new ones included."""
        return tuple(p + n for p, n in zip(self.prefixes, self.news, strict=True))

    @property
    def tokens(self) -> int:
        """T, query tokens of the step."""
        return sum(self.news)

    @property
    def uniform(self) -> bool:
        """All requests have the same lengths."""
        return len(set(self.prefixes)) == 1 and len(set(self.news)) == 1

    @property
    def mla(self) -> bool:
        """Latents: one KV head whose values are a part of its keys."""
        return (self.dim, self.v_dim) == _LATENT

    @property
    def mode(self) -> ForwardMode:
        """Of its batch."""
        return _MODES[self.step]

    @property
    def phase(self) -> Phase:
        """Whose backend serves it."""
        return _PHASES[self.step]

    @property
    def role(self) -> Role:
        """By whose times it is routed."""
        return _ROLES[self.step]

    @property
    def size(self) -> tuple[float, float, float, float]:
        """(requests, mean KV length, mean new tokens, prompts), as `ShapeRouter` measures its step."""
        length, chunks = sum(self.lengths) / self.batch, [new for new in self.news if new > 1]
        if self.step != "mixed":
            return self.batch, length, self.tokens / self.batch, 0
        return self.batch, length, sum(chunks) / len(chunks) if chunks else 1, len(chunks)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of q, k, v and the output."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def torch_kv_dtype(self) -> torch.dtype:
        """Of the pool."""
        found: torch.dtype = getattr(torch, self.kv_dtype)
        return found

    def spec(self) -> anyattn.AttentionSpec:
        """The layer."""
        if self.mla:
            return anyattn.AttentionSpec(
                num_q_heads=self.num_q, num_kv_heads=1, head_dim=self.dim, v_head_dim=self.v_dim,
                scale=192**-0.5, mla=anyattn.MLASpec(),
            )  # fmt: skip
        return anyattn.AttentionSpec(
            num_q_heads=self.num_q, num_kv_heads=self.num_kv, head_dim=self.dim, v_head_dim=self.v_dim,
            sliding_window=self.window,
        )  # fmt: skip

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call must read: keys that no query sees are left out."""
        sizes = zip(self.prefixes, self.news, strict=True)
        seen = sum(p + n if self.window is None else min(p + n, n + self.window - 1) for p, n in sizes)
        width = self.dim if self.mla else self.dim + self.v_dim
        return seen * self.num_kv * width * self.torch_kv_dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of K and V that lie in the pool."""
        width = self.dim if self.mla else self.dim + self.v_dim
        return sum(self.lengths) * self.num_kv * width * self.torch_kv_dtype.itemsize

    def work(self) -> Work:
        """Bytes and floating-point operations of a causal call: each byte of K and V once."""
        sizes = zip(self.prefixes, self.news, strict=True)
        pairs = sum(_pairs(p, n, self.window) for p, n in sizes)
        width = self.dim + self.v_dim
        io = self.tokens * self.num_q * width * self.torch_dtype.itemsize
        return Work(bytes=self.kv_bytes + io, flops=2 * self.num_q * width * pairs)

    @property
    def name(self) -> str:
        """Short and without blanks: workload, shape, and what isn't the default of most cells."""
        parts = [self.workload, f"{self.batch}x{self._lengths_text()}", f"{self.num_q}/{self.num_kv}"]
        parts.append("mla" if self.mla else f"d{self.dim}")
        parts.append(f"p{self.page}")
        if self.window is not None:
            parts.append(f"w{self.window}")
        if self.kv_dtype != self.dtype:
            parts.append(self.kv_dtype.replace("float8_", ""))
        elif self.dtype != "bfloat16":
            parts.append(self.dtype)
        return "-".join(parts)

    def _lengths_text(self) -> str:
        if self.uniform and self.step == "decode":
            return _short(self.lengths[0])
        if self.uniform:
            return f"{_short(self.prefixes[0])}+{_short(self.news[0])}"
        mean = round(sum(self.prefixes) / self.batch)
        return f"~{mean}" if self.step == "decode" else f"~{mean}+{round(self.tokens / self.batch)}"

    def to_json(self) -> dict[str, Any]:
        """As results have it: prefix and new are means where requests differ, which `lengths` then lists."""
        data: dict[str, Any] = {
            "name": self.name, "workload": self.workload, "step": self.step, "batch": self.batch,
            "prefix": round(sum(self.prefixes) / self.batch), "new": round(self.tokens / self.batch),
            "num_q": self.num_q, "num_kv": self.num_kv, "dim": self.dim, "v_dim": self.v_dim,
            "page": self.page, "dtype": self.dtype, "kv_dtype": self.kv_dtype, "window": self.window,
        }  # fmt: skip
        if not self.uniform:
            data["lengths"] = [list(pair) for pair in zip(self.prefixes, self.news, strict=True)]
        if self.weight != 1.0:
            data["weight"] = self.weight
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Cell:
        """The cell that `to_json` wrote, without modes and worth."""
        pairs: Sequence[Sequence[int]] = (
            data.get("lengths") or [(data["prefix"], data["new"])] * data["batch"]
        )
        names = ("workload", "step", "num_q", "num_kv", "dim", "v_dim", "page", "dtype", "kv_dtype", "window")
        return Cell(
            prefixes=tuple(p for p, _ in pairs), news=tuple(n for _, n in pairs),
            weight=data.get("weight", 1.0), **{name: data[name] for name in names},
        )  # fmt: skip


def _pairs(prefix: int, new: int, window: int | None) -> float:
    """Visible (query, key) pairs of a request: keys 0 … p of a query at position p, at most `window`."""
    if window is None or prefix + new <= window:
        return new * prefix + new * (new + 1) / 2
    growing = max(0, window - prefix)
    return growing * prefix + growing * (growing + 1) / 2 + (new - growing) * window


def _short(number: int) -> str:
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)
