"""Test cases as data: one frozen `Case` is one step with everything that can vary, and its `repr` is how
to run it again. `random_case` draws valid ones from a `CaseSpace`, with lengths at the edges that break
kernels (a page, a window, nothing cached, nothing new).
"""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

from anyattn.core.spec import AttentionKind, AttentionSpec
from anyattn.errors import ConfigError, UnknownNameError

__all__ = [
    "KV_SOURCES",
    "MODES",
    "SLOT_LAYOUTS",
    "Case",
    "CaseSpace",
    "parse_case",
    "random_case",
    "random_cases",
]

MASKS = (None, "tree", "random")
KV_SOURCES = ("write", "arguments", "cached")
MODES = ("decode", "extend", "mixed", "verify", "draft_extend")
SLOT_LAYOUTS = ("contiguous", "shuffled_pages", "interleaved", "non_monotonic")
_HALF = {"bfloat16", "float16"}


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One attention step. Lengths are per request; dtypes are torch names.

    Attributes:
        prefix_lens, extend_lens: cached and new tokens; in `mixed` the last `num_decode` are decode rows.
        slot_layout: where requests' pages lie: one after another, shuffled, taken in turns, or falling.
        scale: softmax scale, None = 1/sqrt(D). k_scale, v_scale: of the stored KV,
            one number or one per KV head.
        mask: `tree` (random tree of draft tokens), `random` (any cells, some rows empty) or None.
        encoder_lens: encoder tokens per request (cross only).
        strided: q, k and v are slices of one fused tensor. flat: they are `[T, heads * size]`.
        give_out: pass `out=` and `lse_out=`; return_lse: ask for the LSE.
        kv: `write` stores this step's KV and reads it back, `arguments` attends to it without storing it,
            `cached` finds it stored already and passes no k and v.
        device_ints: batch fields as tensors on the device rather than lists.
        padding: rows at the end that stand for nobody.
        seed: of the values.
    """

    mode: str = "extend"
    kind: str = "causal"
    prefix_lens: tuple[int, ...] = (0,)
    extend_lens: tuple[int, ...] = (1,)
    num_decode: int = 0
    encoder_lens: tuple[int, ...] | None = None
    page_size: int = 1
    layout: str = "NHD"
    slot_layout: str = "contiguous"
    num_q_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 8
    v_head_dim: int = 8
    dtype: str = "float32"
    kv_dtype: str = "float32"
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    scale: float | None = None
    k_scale: float | tuple[float, ...] = 1.0
    v_scale: float | tuple[float, ...] = 1.0
    mask: str | None = None
    strided: bool = False
    flat: bool = False
    give_out: bool = False
    return_lse: bool = True
    kv: str = "write"
    device_ints: bool = False
    padding: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = {len(self.prefix_lens), len(self.extend_lens), len(self.encoder_lens or self.prefix_lens)}
        if len(sizes) != 1 or not self.prefix_lens:
            raise ConfigError("lengths of a case", asked=sizes, allowed="one per request, at least one")
        for name, known in (("mode", MODES), ("slot_layout", SLOT_LAYOUTS), ("kv", KV_SOURCES)):
            if getattr(self, name) not in known:
                raise UnknownNameError(f"{name} of a case", getattr(self, name), known)
        if self.mask not in MASKS or (self.mask == "tree" and self.mode != "verify"):
            raise ConfigError(
                "mask of a case", asked=(self.mask, self.mode), allowed=f"{MASKS}, tree in verify"
            )
        if self.mode == "decode" and set(self.extend_lens) != {1}:
            raise ConfigError("a decode case has one new token per request", asked=self.extend_lens)
        if (self.kind == "cross") != (self.encoder_lens is not None):
            raise ConfigError("encoder_lens go with kind='cross'", asked=(self.kind, self.encoder_lens))
        if self.kind == "encoder_only" and (any(self.prefix_lens) or self.kv != "arguments"):
            raise ConfigError("encoder-only layers have no cache", asked=(self.prefix_lens, self.kv))

    def __repr__(self) -> str:
        """One line, only what differs from the defaults; `eval` gives the case back."""
        changed = [
            f"{f.name}={value!r}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default or f.name in ("prefix_lens", "extend_lens")
        ]
        return f"Case({', '.join(changed)})"

    @property
    def batch_size(self) -> int:
        """Requests, padding not counted."""
        return len(self.prefix_lens)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """KV tokens of each request, this step's included."""
        return tuple(p + e for p, e in zip(self.prefix_lens, self.extend_lens, strict=True))

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step, padding not counted."""
        return sum(self.extend_lens)

    def spec(self) -> AttentionSpec:
        """What the layer of this case is."""
        return AttentionSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            scale=self.scale or 0.0,
            sliding_window=self.window,
            logit_cap=self.logit_cap,
            sinks=self.sinks,
            kind=AttentionKind(self.kind),
        )

    def tolerance(self) -> float:
        """Largest error (max |d| / max |ref| per request) that a right answer may have."""
        return {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[self.dtype]


def parse_case(text: str) -> Case:
    """The case that a `repr` describes. Only literals are read; nothing is run.

    Raises:
        ConfigError: it isn't `Case(name=literal, ...)`, or not a valid case.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "Case" or call.args:
            raise ValueError(text)
        return Case(**{str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
    except (SyntaxError, ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        hint = "copy it from a failure: Case(mode='decode', prefix_lens=(7,), extend_lens=(1,))"
        raise ConfigError("a case", asked=text, allowed="Case(name=literal, ...)", hint=hint) from error


@dataclass(frozen=True, kw_only=True)
class CaseSpace:
    """What cases may look like. The defaults are all that the reference backend must do.

    Give a backend's kit a smaller space; `dtypes` are (model dtype, KV dtype) pairs, `heads` (Hq, Hkv),
    `head_dims` (D, Dv). `max_context` and `max_extend` bound the work of one case.
    """

    modes: tuple[str, ...] = MODES
    kinds: tuple[str, ...] = ("causal", "causal", "causal", "bidirectional", "encoder_only", "cross")
    pages: tuple[int, ...] = (1, 1, 2, 4, 8, 16, 32, 64, 256)
    layouts: tuple[str, ...] = ("NHD", "HND")
    slot_layouts: tuple[str, ...] = SLOT_LAYOUTS
    heads: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (3, 1), (4, 4), (4, 2), (6, 3), (8, 2))
    head_dims: tuple[tuple[int, int], ...] = ((8, 8), (16, 16), (24, 8), (16, 32), (64, 64), (80, 80))
    dtypes: tuple[tuple[str, str], ...] = (("float32", "float32"),)
    windows: tuple[int | None, ...] = (None, None, 1, 2, 5, 8, 17)
    caps: tuple[float | None, ...] = (None, None, 1.5, 30.0)
    sinks: tuple[bool, ...] = (False, False, True)
    scales: tuple[float | None, ...] = (None, None, 0.3)
    kv_scales: tuple[float, ...] = (1.0,)
    scales_per_head: bool = False
    masks: tuple[str | None, ...] = (None, None, "tree", "random")
    kv_sources: tuple[str, ...] = ("write", "write", "write", "arguments", "cached")
    paddings: tuple[int, ...] = (0, 0, 0, 2)
    device_ints: tuple[bool, ...] = (False, False, True)
    max_requests: int = 6
    max_context: int = 96
    max_extend: int = 24


def random_cases(seed: int, count: int, space: CaseSpace | None = None) -> Iterator[Case]:
    """`count` cases, the same for the same seed; case i alone is `random_case(Random(f"{seed}/{i}"))`."""
    for index in range(count):
        yield random_case(random.Random(f"{seed}/{index}"), space)


def random_case(rng: random.Random, space: CaseSpace | None = None) -> Case:
    """One valid case of the space."""
    space = space or CaseSpace()
    kind = rng.choice(space.kinds)
    mode = rng.choice(_modes_for(kind, space))
    page, window = rng.choice(space.pages), None if kind == "cross" else rng.choice(space.windows)
    count = rng.randint(1, space.max_requests)
    prefix, extend, num_decode = _lengths(rng, space, mode, kind, count, page, window)
    encoder = tuple(_edge(rng, page, None, space.max_context) for _ in range(count))
    heads, dims, (dtype, kv_dtype) = (
        rng.choice(space.heads), rng.choice(space.head_dims), rng.choice(space.dtypes)
    )  # fmt: skip
    return Case(
        mode=mode,
        kind=kind,
        prefix_lens=prefix,
        extend_lens=extend,
        num_decode=num_decode,
        encoder_lens=encoder if kind == "cross" else None,
        page_size=page,
        layout=rng.choice(space.layouts),
        slot_layout=rng.choice(space.slot_layouts),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=dims[0],
        v_head_dim=dims[1],
        dtype=dtype,
        kv_dtype=kv_dtype,
        window=window,
        logit_cap=rng.choice(space.caps),
        sinks=rng.choice(space.sinks),
        scale=rng.choice(space.scales),
        k_scale=_scale(rng, space, heads[1]),
        v_scale=_scale(rng, space, heads[1]),
        mask=_mask(rng, space, kind, mode),
        strided=rng.random() < 0.4,
        flat=rng.random() < 0.3,
        give_out=rng.random() < 0.3,
        return_lse=rng.random() < 0.7,
        kv=_kv_source(rng, space, kind, mode),
        device_ints=rng.choice(space.device_ints),
        padding=rng.choice(space.paddings) if mode in ("decode", "extend") and kind == "causal" else 0,
        seed=rng.randrange(2**31),
    )


def _modes_for(kind: str, space: CaseSpace) -> tuple[str, ...]:
    allowed = {"encoder_only": ("extend",), "cross": ("extend", "decode"), "bidirectional": ("extend",)}
    fitting = tuple(m for m in space.modes if m in allowed.get(kind, MODES))
    if not fitting:
        raise ConfigError(f"no mode of the space serves {kind}", asked=space.modes, allowed=allowed[kind])
    return fitting


def _kv_source(rng: random.Random, space: CaseSpace, kind: str, mode: str) -> str:
    if kind == "encoder_only":
        return "arguments"
    source = rng.choice(space.kv_sources)
    return "cached" if kind == "cross" and mode == "decode" else source


def _mask(rng: random.Random, space: CaseSpace, kind: str, mode: str) -> str | None:
    """Trees where drafts are verified, any cells there and in extends, none for encoder keys."""
    mask = rng.choice(space.masks)
    fitting = (None, "tree", "random") if mode == "verify" else (None, "random")
    return mask if mask in fitting and kind != "cross" and mode in ("verify", "extend") else None


def _scale(rng: random.Random, space: CaseSpace, heads: int) -> float | tuple[float, ...]:
    if space.scales_per_head and rng.random() < 0.5:
        return tuple(rng.choice(space.kv_scales) for _ in range(heads))
    return rng.choice(space.kv_scales)


def _lengths(
    rng: random.Random, space: CaseSpace, mode: str, kind: str, count: int, page: int, window: int | None
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(prefix lengths, extend lengths, decode rows)."""
    prefix = [
        0 if kind == "encoder_only" else _edge(rng, page, window, space.max_context) for _ in range(count)
    ]
    if mode == "decode":
        return tuple(prefix), (1,) * count, 0
    if mode in ("verify", "draft_extend"):
        return tuple(prefix), tuple(rng.randint(1, 6) for _ in range(count)), 0
    extend = [_edge(rng, page, window, space.max_extend) for _ in range(count)]
    if rng.random() < 0.15:
        extend[rng.randrange(count)] = 0
    num_decode = rng.randint(1, count) if mode == "mixed" else 0
    if num_decode:
        extend[-num_decode:] = [1] * num_decode
    return tuple(prefix), tuple(extend), num_decode


def _edge(rng: random.Random, page: int, window: int | None, limit: int) -> int:
    """A length next to something that kernels get wrong, or any at all; 0 .. limit."""
    near = [0, 1, page - 1, page, page + 1, 2 * page, 2 * page + 1]
    if window is not None:
        near += [window - 1, window, window + 1, 3 * window + page]
    fitting = [n for n in near if 0 <= n <= limit]
    return rng.choice(fitting) if rng.random() < 0.7 else rng.randint(0, limit)
