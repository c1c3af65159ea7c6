"""Buckets: which steps count as alike. Heads, sizes and dtypes are exact; counts are powers of two.

A count goes to the nearest power of two in ratio: 1, 2, 3 -> 1, 2, 4; 6 -> 8; 1,000 and 1,023 -> 1,024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from anyattn.core.arguments import check_whole
from anyattn.core.capabilities import Phase
from anyattn.core.spec import AttentionSpec
from anyattn.errors import ConfigError

__all__ = ["EAGER", "GRAPH", "RUNS", "Bucket", "Role", "Shape", "Workload", "power_of_two",
           "size_text"]  # fmt: skip

EAGER, GRAPH = "eager", "graph"
_COUNTS = ("q_heads", "kv_heads", "head_dim", "v_head_dim", "page", "requests", "kv_len", "new_tokens",
           "prompts")  # fmt: skip
RUNS = (EAGER, GRAPH)
"""How a step was run: launched from Python, host time included, or as a replayed graph."""


def power_of_two(count: float) -> int:
    """The power of two that is nearest in ratio; 1 for everything up to 1."""
    return 1 if count <= 1 else 1 << round(math.log2(count))


class Role(Enum):
    """Kinds of steps that are timed and routed apart. MIXED: chunks of prompts beside decoding requests."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    VERIFY = "verify"

    @staticmethod
    def of(phase: Phase) -> Role:
        """Whose times count for a phase: drafts decode."""
        return Role.DECODE if phase is Phase.DRAFT else Role(phase.value)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer as a kernel sees it: MLA with its absorbed sizes; `window` is a power of two, or None."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    kv_dtype: str
    window: int | None = None
    mla: bool = False

    @staticmethod
    def of(spec: AttentionSpec, dtype: str, kv_dtype: str) -> Shape:
        """The shape of a layer; dtypes are torch names."""
        window = None if spec.sliding_window is None else power_of_two(spec.sliding_window)
        heads, sizes = spec.num_kv_heads, (spec.head_dim, spec.v_head_dim)
        if spec.mla is not None:
            rank = spec.mla.kv_lora_rank
            heads, sizes = 1, (rank + spec.mla.qk_rope_head_dim, rank)
        return Shape(
            q_heads=spec.num_q_heads, kv_heads=heads, head_dim=sizes[0], v_head_dim=sizes[1], dtype=dtype,
            kv_dtype=kv_dtype, window=window, mla=spec.mla is not None,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    def is_sharded(self, other: Shape) -> bool:
        """True if the two differ only in how many groups of heads they have, as ranks do."""
        mine, yours = _but_heads(self), _but_heads(other)
        return mine == yours and self.group == other.group

    def __str__(self) -> str:
        size = f"{self.head_dim}" + ("" if self.head_dim == self.v_head_dim else f"/{self.v_head_dim}")
        kv = "" if self.kv_dtype == self.dtype else f", KV {self.kv_dtype}"
        window = "" if self.window is None else f", window {self.window}"
        mla = "MLA, " if self.mla else ""
        return f"{mla}{self.q_heads}/{self.kv_heads} heads of {size}, {self.dtype}{kv}{window}"


def _but_heads(shape: Shape) -> list[object]:
    return [getattr(shape, f.name) for f in fields(Shape) if f.name not in ("q_heads", "kv_heads")]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Steps that count as alike.

    Attributes:
        role: DECODE (one new token a request), PREFILL (many), MIXED, VERIFY.
        page, layout: of the KV pool. run: `eager` or `graph`.
        requests: of the step. kv_len: mean KV tokens of a request, the step's own included.
        new_tokens: mean new tokens of a request; in MIXED, of those that don't decode.
        prompts: requests of a MIXED step that don't decode; 0 in the other roles. All are powers of two.

    Raises:
        ConfigError: another run, a MIXED step without prompts, prompts in another role.
    """

    role: Role
    shape: Shape
    page: int
    layout: str
    run: str
    requests: int
    kv_len: int
    new_tokens: int = 1
    prompts: int = 0

    def __post_init__(self) -> None:
        if self.run not in RUNS:
            raise ConfigError("run of a bucket", asked=self.run, allowed=" or ".join(RUNS))
        if bool(self.prompts) != (self.role is Role.MIXED):
            asked = f"{self.prompts} in {self.role.value}"
            raise ConfigError("prompts of a bucket", asked=asked, allowed="1 or more in mixed, else 0")
        for name in ("requests", "kv_len", "new_tokens", *(["prompts"] if self.prompts else [])):
            object.__setattr__(self, name, power_of_two(getattr(self, name)))

    @property
    def size(self) -> tuple[int, int, int, int]:
        """(requests, KV tokens, new tokens, prompts)."""
        return self.requests, self.kv_len, self.new_tokens, self.prompts

    def to_json(self) -> dict[str, Any]:
        """Plain values, flat; `prompts` where there are some."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "shape"}
        shape = {f.name: getattr(self.shape, f.name) for f in fields(Shape)}
        told = own | {"role": self.role.value} | {k: v for k, v in shape.items() if v or k != "mla"}
        return {k: v for k, v in told.items() if v or k != "prompts"}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Bucket:
        """The bucket that `to_json` wrote, or that of a table of version 1, whose roles were phases.

        Raises TypeError, ValueError or KeyError for anything else.
        """
        names = {f.name for f in fields(Shape)}
        for name, value in data.items():
            if name in _COUNTS and not (isinstance(value, int) and value > 0):
                raise ValueError(f"{name} = {value!r}, no whole number >= 1")
        shape = Shape(**{k: v for k, v in data.items() if k in names})
        rest = {k: v for k, v in data.items() if k not in names}
        role = Role(rest.pop("phase") if "role" not in rest else rest["role"])
        return Bucket(**{**rest, "role": role, "shape": shape})

    def distance(self, requests: float | None, kv_len: float | None, new_tokens: float | None) -> float:
        """Steps of two between this bucket and a step, in the count that lies farthest; None = any."""
        pairs = ((requests, self.requests), (kv_len, self.kv_len), (new_tokens, self.new_tokens))
        gaps = [abs(math.log2(power_of_two(want) / own)) for want, own in pairs if want is not None]
        return max(gaps, default=0.0)

    def __str__(self) -> str:
        return f"{self.role.value} {size_text(*self.size)} ({self.run}, page {self.page})"


def size_text(requests: int, kv_len: int, new_tokens: int, prompts: int) -> str:
    """A step's size for a reader: `64 x 8192`, `16 x 8192, 8 new`, `64 x 4096, 1 with 2048 new`."""
    if prompts:
        return f"{requests} x {kv_len}, {prompts} with {new_tokens} new"
    return f"{requests} x {kv_len}, {new_tokens} new" if new_tokens > 1 else f"{requests} x {kv_len}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The usual step of a process, where its author knows it; None = any.

    Attributes:
        requests: of a decode step. kv_len: KV tokens of a request then.
        new_tokens: of a request in a prefill step (its chunk).
        graphs: decode steps run as graphs; prefill is ranked by eager times either way.
    """

    requests: int | None = None
    kv_len: int | None = None
    new_tokens: int | None = None
    graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("requests", "kv_len", "new_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_whole(f"Workload.{name}", value, 1, hint="leave it out for any")
