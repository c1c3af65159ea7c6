"""A call of FlashAttention-3's compiled `fwd`: its arguments, its canonical window, and what it refuses.

From `hopper/flash_api.cpp` of the forks that ship it, on SM90.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.testing.emulators.modules import EmulationError
from anyattn.testing.emulators.softmax import check

__all__ = ["Build", "Forward", "Heads", "Mask", "check_call", "metadata_size"]

Tensor = torch.Tensor
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Build:
    """What a distribution compiled in. `unequal`: V's head size may differ from Q's and K's."""

    softcap: bool
    unequal: bool
    sinks: str = "sinks"


@dataclass(frozen=True)
class Heads:
    """Sizes of heads. `group` is query heads per KV head."""

    num_q: int
    num_kv: int
    dim: int
    v_dim: int
    fp8: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q // self.num_kv


@dataclass(frozen=True)
class Mask:
    """A window in canonical form: -1 is no bound. `causal` and `local` choose kernels."""

    left: int
    right: int

    @classmethod
    def of(
        cls, causal: bool, window: tuple[int, int], max_q: int, max_k: int, head_dim: int, paged: bool
    ) -> Mask:
        """As the library resolves it, its shortcuts included: with one query row in all, the causal flag of
        most kernels is dropped, which is wrong where `max_q` understates the rows."""
        left, right = int(window[0]), int(window[1])
        left = -1 if left >= max_k - 1 else left
        right = -1 if right >= max_q - 1 else right
        if max_q == 1 and (left, right) == (-1, -1) and not (paged and 64 < head_dim <= 128):
            causal = False
        return cls(left, 0 if causal else right)

    @property
    def causal(self) -> bool:
        """The kernel for a plain causal mask."""
        return self.left < 0 and self.right == 0

    @property
    def local(self) -> bool:
        """The kernel for windows."""
        return not self.causal and (self.left >= 0 or self.right >= 0)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Arguments of the compiled `fwd`, those that a caller of paged or ragged attention gives."""

    q: Tensor
    k: Tensor
    v: Tensor
    qv: Tensor | None = None
    only_qv: bool = False
    out: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    page_table: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    softmax_scale: float
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    metadata: Tensor | None = None
    num_splits: int = 1
    pack_gqa: bool | None = None
    sinks: Tensor | None = None

    @property
    def heads(self) -> Heads:
        """Sizes of this call."""
        return Heads(
            self.q.shape[-2], self.k.shape[-2], self.q.shape[-1], self.v.shape[-1], self.q.dtype == _FP8
        )

    @property
    def batch_size(self) -> int:
        """Requests."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def seqlen_q(self) -> int:
        """Longest query that the launch counts on."""
        return self.q.shape[1] if self.cu_seqlens_q is None else int(self.max_seqlen_q or 0)

    @property
    def seqlen_k(self) -> int:
        """Longest key row that the launch counts on: of a table, its whole width."""
        if self.page_table is not None:
            return self.page_table.shape[1] * self.k.shape[1]
        return self.k.shape[1] if self.cu_seqlens_k is None else int(self.max_seqlen_k or 0)

    @property
    def mask(self) -> Mask:
        """The canonical window."""
        paged = self.page_table is not None
        return Mask.of(self.causal, self.window, self.seqlen_q, self.seqlen_k, self.heads.dim, paged)


def metadata_size(batch_size: int, mask: Mask) -> int:
    """int32 of the scheduler's buffer where lengths vary: vectors of B rounded up to 4, and a counter."""
    vectors = 2 + (not mask.local) + (mask.causal or mask.local)
    return -(-batch_size // 4) * 4 * vectors + 1


def _int32(name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    if x is not None:
        check(x.dtype == torch.int32, f"{name} must have dtype torch.int32")
        check(x.is_contiguous(), f"{name} must be contiguous")
        check(tuple(x.shape) == shape, f"{name} must have shape {shape}")


def check_call(call: Forward, build: Build) -> None:
    """The library's checks.

    Raises:
        RuntimeError: what it refuses.
        EmulationError: what it takes and the stand-in doesn't know.
    """
    heads, batch = call.heads, call.batch_size
    half = call.q.dtype in (torch.float16, torch.bfloat16)
    check(half or heads.fp8, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(call.k.dtype == call.q.dtype, "query and key must have the same dtype")
    check(call.v.dtype == call.q.dtype, "query and value must have the same dtype")
    for x in (call.q, call.k, call.v):
        check(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    if call.page_table is not None:
        check(call.page_table.dtype == torch.int32, "page_table must have dtype torch.int32")
        check(call.page_table.stride(-1) == 1, "page_table must have contiguous last dimension")
        check(call.page_table.shape[0] == batch, "batch_size must be equal to batch_size_k")
    elif call.cu_seqlens_k is None:
        check(call.k.shape[0] == batch, "batch_size must be equal to batch_size_k")
    ragged_q, ragged_k = call.cu_seqlens_q is not None, call.cu_seqlens_k is not None
    check(not ragged_q or call.max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is")
    check(not ragged_k or call.max_seqlen_k is not None, "max_seqlen_k must be provided if cu_seqlens_k is")
    check(
        not (ragged_k and call.page_table is not None),
        "If cu_seqlens_k is passed in, then page table is not supported",
    )
    _int32("cu_seqlens_q", call.cu_seqlens_q, (batch + 1,))
    _int32("cu_seqlens_k", call.cu_seqlens_k, (batch + 1,))
    _int32("seqused_q", call.seqused_q, (batch,))
    _int32("seqused_k", call.seqused_k, (batch,))
    check(call.q.dim() == (3 if ragged_q else 4), "q must have shape (total_q, h, d) or (b, s_q, h, d)")
    check(call.k.dim() == (3 if ragged_k else 4), "k must have shape (total_k, h_k, d) or 4 dimensions")
    check(call.k.shape[-1] == heads.dim, "k must have the head size of q")
    check(call.k.shape[:-1] == call.v.shape[:-1], "v must have the shape of k but for its head size")
    _check_sizes(call, build)
    _check_extras(call, build)


def _check_sizes(call: Forward, build: Build) -> None:
    heads, alignment = call.heads, 16 if call.heads.fp8 else 8
    check(
        heads.num_q % heads.num_kv == 0, "Number of heads in key/value must divide number of heads in query"
    )
    check(heads.dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    for name, size in (("head_size", heads.dim), ("head_size_v", heads.v_dim)):
        check(size % alignment == 0, f"{name} should be a multiple of {alignment}")
    deepseek = 128 < heads.dim <= 192 and 96 < heads.v_dim <= 128
    check(
        heads.dim == heads.v_dim or deepseek or (heads.dim <= 64 and heads.v_dim <= 512),
        "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] and V headdim in "
        "(96, 128], or (Q/K <= 64 and V <= 512).",
    )
    check(
        build.softcap or call.softcap == 0.0, "This flash attention build does not support tanh softcapping."
    )
    check(call.num_splits <= 256, "num_splits > 256 not supported")
    if call.qv is not None:
        check(heads.dim <= 64, "q_v is only supported for head_size <= 64")
        check(heads.v_dim >= 256, "q_v is only supported for hdim_v >= 256.")
        check(not heads.fp8, "q_v is only supported for fp16 and bf16 data type")
        check(call.qv.dtype == call.q.dtype, "q_v must have the same dtype as query")
        check(call.qv.stride(-1) == 1, "q_v tensor must have contiguous last dimension")
        check(call.qv.shape == (*call.q.shape[:-1], heads.v_dim), "q_v must have shape (total_q, h, dv)")
    check(not call.only_qv or call.qv is not None, "only_qv requires q_v")


def _check_extras(call: Forward, build: Build) -> None:
    heads, batch = call.heads, call.batch_size
    if call.sinks is not None:
        name = build.sinks
        check(call.sinks.dtype == torch.bfloat16, f"{name} must have dtype bfloat16")
        check(call.sinks.shape == (heads.num_q,), f"{name} must have shape (num_heads)")
        check(call.sinks.is_contiguous(), f"{name} must be contiguous")
    if heads.fp8:  # they are not even looked at otherwise
        for which, x in (("q", call.q_descale), ("k", call.k_descale), ("v", call.v_descale)):
            check(x is None or x.shape == (batch, heads.num_kv), f"{which}_descale must have shape (b, h_k)")
            check(x is None or x.dtype == torch.float32, f"expected scalar type Float for {which}_descale")
    if call.out is not None:
        wanted = torch.bfloat16 if heads.fp8 else call.q.dtype
        check(call.out.dtype == wanted, "output must have the same dtype as inputs; BF16 for FP8 input")
        check(call.out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        check(call.out.shape == (*call.q.shape[:-1], heads.v_dim), "out must have shape (total_q, h, dv)")
    if call.metadata is not None:
        if call.seqused_k is None and call.cu_seqlens_q is None and call.cu_seqlens_k is None:
            raise EmulationError("scheduler metadata of a batch whose lengths don't vary", asked="fixed")
        check(call.metadata.dtype == torch.int32, "scheduler_metadata must have dtype int32")
        check(call.metadata.is_contiguous(), "scheduler_metadata must be contiguous")
        size = metadata_size(batch, call.mask)
        check(call.metadata.shape == (size,), f"scheduler_metadata must have shape ({size})")
