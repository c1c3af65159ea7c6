"""What the verifier of graphs captures: each mode, mask, window and sink that a backend declares; sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import CapabilityRow, Feature, Phase
from anyattn.core.select.pages import kernel_page
from anyattn.core.spec import AttentionSpec, MLASpec
from anyattn.core.traits import TreeMaskMode

__all__ = ["GraphSetup", "Sizes", "setups"]

_PHASES = {
    ForwardMode.DECODE: Phase.DECODE,
    ForwardMode.TARGET_VERIFY: Phase.VERIFY,
    ForwardMode.DRAFT_EXTEND: Phase.DRAFT,
}
_DRAFTS = 3
_PAGES = (4, 16, 32, 64, 128, 256, 1)
_SHAPES = ((4, 2, 16), (8, 2, 64), (8, 2, 128), (4, 1, 128), (8, 8, 128))
_LATENTS = ((2, 16, 8), (16, 512, 64), (64, 512, 64), (128, 512, 64))
_WINDOW = 6
_CONTEXT = 300  # long enough for kernels that split rows


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model and the steps; `latent`: `(rank, rope)`, else a dense model."""

    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "float32"
    page_size: int = 4
    layout: str = "NHD"
    max_context: int = 40
    buckets: tuple[int, ...] = (1, 2, 5)
    latent: tuple[int, int] | None = None

    def spec(self, window: int | None, sinks: bool) -> AttentionSpec:
        """One layer."""
        if self.latent is None:
            return AttentionSpec(
                num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
                sliding_window=window, sinks=sinks,
            )  # fmt: skip
        rank, rope = self.latent
        nope = max(8, rank // 4)
        return AttentionSpec(
            num_q_heads=self.num_q_heads, num_kv_heads=1, head_dim=rank + rope, v_head_dim=rank,
            scale=(nope + rope) ** -0.5, sliding_window=window, sinks=sinks,
            mla=MLASpec(kv_lora_rank=rank, qk_rope_head_dim=rope, qk_nope_head_dim=nope, v_head_dim=nope),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraphSetup:
    """One captured mode. The model has two layers: a plain one, and one with `window` and `sinks`.

    Attributes:
        tokens: query tokens of each request. mask: form of the tree mask, None for chains.
    """

    mode: ForwardMode = ForwardMode.DECODE
    tokens: int = 1
    mask: TreeMaskMode | None = None
    window: int | None = None
    sinks: bool = False
    sizes: Sizes = Sizes()

    @property
    def name(self) -> str:
        """In words."""
        parts = [self.mode.value if self.sizes.latent is None else f"{self.mode.value} of latents"]
        if self.mode is ForwardMode.TARGET_VERIFY:
            parts.append("chain" if self.mask is None else f"tree ({self.mask.value})")
        parts += [f"window {self.window}"] if self.window else []
        parts += ["sinks"] if self.sinks else []
        return ", ".join(parts)

    def specs(self) -> list[AttentionSpec]:
        """Of the two layers."""
        return [self.sizes.spec(None, False), self.sizes.spec(self.window, self.sinks)]


def setups(rows: tuple[CapabilityRow, ...], *, latent: bool, large: bool) -> Iterator[GraphSetup]:
    """One of each thing that some row declares for graphs.

    `rows`: of the host and the kind of model. `large`: sizes and contexts for a device.
    """
    for mode, phase in _PHASES.items():
        serving = [row for row in rows if phase in row.phases and row.graph]
        serving.sort(key=lambda row: "float32" not in row.dtypes or "float32" not in row.kv_dtypes)
        for row in serving[:1]:
            sizes = _sizes(row, rows, latent, large)
            if sizes is None:
                continue
            tokens = 1 if mode is ForwardMode.DECODE else _DRAFTS
            plain = GraphSetup(mode=mode, tokens=tokens, sizes=sizes)
            yield plain
            yield from _variants(plain, serving, large)


def _variants(plain: GraphSetup, rows: list[CapabilityRow], large: bool) -> Iterator[GraphSetup]:
    declared = frozenset(f for row in rows for f in row.features)
    window = (100 if large else _WINDOW) if Feature.WINDOW in declared else None
    both = {Feature.WINDOW, Feature.SINKS} <= declared
    together = any({Feature.WINDOW, Feature.SINKS} <= set(row.features) for row in rows)
    if window and not together:
        yield replace(plain, window=window)
    if Feature.SINKS in declared:
        yield replace(plain, window=window if together and both else None, sinks=True)
    elif window and together:
        yield replace(plain, window=window)
    if plain.mode is ForwardMode.TARGET_VERIFY and Feature.EXPLICIT_MASK in declared:
        for form in TreeMaskMode:
            yield replace(plain, mask=form)


def _sizes(row: CapabilityRow, rows: tuple[CapabilityRow, ...], latent: bool, large: bool) -> Sizes | None:
    """The smallest that the row takes, float32 where it may be; None if none fits. `rows`: of all phases."""
    dtype = next(
        (d for d in ("float32", "bfloat16", "float16") if d in row.dtypes and d in row.kv_dtypes), None
    )
    if large and "bfloat16" in row.dtypes:
        dtype = "bfloat16"
    layout = row.layouts[0]
    takers = [[r for r in rows if phase in r.phases] for phase in Phase]
    page = next((p for p in _PAGES if all(_taken(p, layout, t) for t in ([row], *takers) if t)), None)
    if dtype is None or page is None:
        return None
    context, buckets = (600, (1, 2, 4, 8, 16)) if large else (max(_CONTEXT, page + page // 2), (1, 2, 5))
    common = Sizes(dtype=dtype, page_size=page, layout=layout, max_context=context, buckets=buckets)
    if latent:
        for heads, rank, rope in _LATENTS:
            fits = row.head_dims.allows(rank + rope, rank) and not (large and rank < 512)
            if fits and (not row.q_heads or heads in row.q_heads):
                return replace(common, num_q_heads=heads, num_kv_heads=1, latent=(rank, rope))
        return None
    for num_q, num_kv, dim in _SHAPES:
        group = num_q // num_kv
        limits = ((num_q, row.q_heads), (num_kv, row.kv_heads), (group, row.group_sizes))
        heads_fit = all(not allowed or value in allowed for value, allowed in limits)
        if heads_fit and row.head_dims.allows(dim, dim) and not (large and dim < 64):
            return replace(common, num_q_heads=num_q, num_kv_heads=num_kv, head_dim=dim)
    return None


def _taken(page: int, layout: str, rows: list[CapabilityRow]) -> bool:
    return any(kernel_page(row, page, layout) is not None for row in rows)
