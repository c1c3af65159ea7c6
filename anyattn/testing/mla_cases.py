"""Test cases of latent attention as data: one frozen `MLACase` is one step, and its `repr` runs it again."""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

from anyattn.core.mla import MLAMethod, MLAPolicy
from anyattn.core.spec import AttentionSpec, MLASpec
from anyattn.errors import ConfigError

__all__ = ["MLACase", "MLASpace", "parse_mla_case", "random_mla_case", "random_mla_cases"]

_MODES = ("decode", "extend", "mixed", "verify", "draft_extend")


@dataclass(frozen=True, kw_only=True, repr=False)
class MLACase:
    """One step of one latent layer. Lengths are per request; dtypes are torch names.

    Attributes:
        prefix_lens, extend_lens: cached and new tokens; in `mixed` the last `num_decode` are decode rows.
        rank, rope, nope, v_dim: sizes of the latent, the rotated part, the rest of a head, a value.
        method: asked of the policy; None leaves it to the plan. chunk_tokens: of its prefix chunks.
        scale: softmax scale, None = 1/sqrt(nope + rope). kv_scale: of the stored latents.
        mask: `tree` (verify) or `random` (extend), or None.
        apart: q and k come without their rope parts, which are `LayerInputs`.
        strided: q and k are slices of one fused tensor. flat: they are `[T, heads * size]`.
        kv: `write`, `arguments` (not stored) or `cached` (no k).
        seed: of the values.
    """

    mode: str = "extend"
    prefix_lens: tuple[int, ...] = (0,)
    extend_lens: tuple[int, ...] = (1,)
    num_decode: int = 0
    page_size: int = 1
    layout: str = "NHD"
    slot_layout: str = "contiguous"
    num_q_heads: int = 2
    rank: int = 64
    rope: int = 16
    nope: int = 16
    v_dim: int = 16
    dtype: str = "float32"
    kv_dtype: str = "float32"
    method: str | None = None
    chunk_tokens: int = 16
    window: int | None = None
    logit_cap: float | None = None
    sinks: bool = False
    scale: float | None = None
    kv_scale: float = 1.0
    mask: str | None = None
    apart: bool = False
    strided: bool = False
    flat: bool = False
    give_out: bool = False
    return_lse: bool = True
    kv: str = "write"
    device_ints: bool = False
    padding: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.prefix_lens) != len(self.extend_lens) or not self.prefix_lens:
            raise ConfigError("lengths of a case", asked=(self.prefix_lens, self.extend_lens))
        masks = (None, "tree" if self.mode == "verify" else "random")
        if self.mode not in _MODES or self.mask not in masks:
            raise ConfigError("mode and mask of a case", asked=(self.mode, self.mask), allowed=_MODES)
        if self.mode == "decode" and set(self.extend_lens) != {1}:
            raise ConfigError("a decode case has one new token per request", asked=self.extend_lens)

    def __repr__(self) -> str:
        """One line, only what differs from the defaults; `eval` gives the case back."""
        changed = [
            f"{f.name}={value!r}"
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) != f.default or f.name in ("prefix_lens", "extend_lens")
        ]
        return f"MLACase({', '.join(changed)})"

    @property
    def batch_size(self) -> int:
        """Requests, padding not counted."""
        return len(self.prefix_lens)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """KV tokens of each request, this step's included."""
        return tuple(p + e for p, e in zip(self.prefix_lens, self.extend_lens, strict=True))

    def spec(self) -> AttentionSpec:
        """What the layer of this case is."""
        return AttentionSpec(
            num_q_heads=self.num_q_heads,
            num_kv_heads=1,
            head_dim=self.rank + self.rope,
            v_head_dim=self.rank,
            scale=self.scale or (self.nope + self.rope) ** -0.5,
            sliding_window=self.window,
            logit_cap=self.logit_cap,
            sinks=self.sinks,
            mla=MLASpec(
                kv_lora_rank=self.rank,
                qk_rope_head_dim=self.rope,
                qk_nope_head_dim=self.nope,
                v_head_dim=self.v_dim,
            ),
        )

    def policy(self) -> MLAPolicy:
        """How the backend of this case chooses its method."""
        method = None if self.method is None else MLAMethod(self.method)
        return MLAPolicy(method=method, chunk_tokens=self.chunk_tokens)

    def tolerance(self) -> float:
        """Largest error (max |d| / max |ref| per request) that a right answer may have."""
        return {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[self.dtype]


def parse_mla_case(text: str) -> MLACase:
    """The case of a `repr`; nothing else is evaluated.

    Raises:
        ConfigError: another expression, or a case that can't be.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) != "MLACase":
            raise ValueError(f"not a call of MLACase: {text!r}")
        fields = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return MLACase(**fields)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            "a latent case", asked=text, allowed="MLACase(name=value, …)", hint=str(error)
        ) from error


@dataclass(frozen=True, kw_only=True)
class MLASpace:
    """What random cases are drawn from. `sizes` are (rank, rope, nope, v)."""

    modes: tuple[str, ...] = _MODES
    pages: tuple[int, ...] = (1, 2, 4, 16)
    heads: tuple[int, ...] = (1, 2, 3, 16)
    sizes: tuple[tuple[int, int, int, int], ...] = ((64, 16, 16, 16), (32, 16, 16, 32), (16, 16, 48, 16))
    dtypes: tuple[tuple[str, str], ...] = (("float32", "float32"),)
    methods: tuple[str | None, ...] = (None, "absorbed", "materialised")
    windows: tuple[int | None, ...] = (None, None, None, 5)
    caps: tuple[float | None, ...] = (None, None, 2.0)
    sinks: tuple[bool, ...] = (False, False, True)
    kv_scales: tuple[float, ...] = (1.0,)
    kv_sources: tuple[str, ...] = ("write", "write", "arguments", "cached")
    max_requests: int = 5
    max_context: int = 60
    max_extend: int = 20


def random_mla_cases(seed: int, count: int, space: MLASpace | None = None) -> Iterator[MLACase]:
    """`count` cases; case i alone is `random_mla_case(Random(f"{seed}/{i}"))`."""
    for index in range(count):
        yield random_mla_case(random.Random(f"{seed}/{index}"), space)


def random_mla_case(rng: random.Random, space: MLASpace | None = None) -> MLACase:
    """One valid case of the space."""
    space = space or MLASpace()
    mode, page, count = rng.choice(space.modes), rng.choice(space.pages), rng.randint(1, space.max_requests)
    prefix = tuple(_edge(rng, page, space.max_context) for _ in range(count))
    extend = [_edge(rng, page, space.max_extend) for _ in range(count)]
    if mode == "decode":
        extend = [1] * count
    elif mode in ("verify", "draft_extend"):
        extend = [rng.randint(1, 6) for _ in range(count)]
    num_decode = rng.randint(1, count) if mode == "mixed" else 0
    if num_decode:
        extend[-num_decode:] = [1] * num_decode
    rank, rope, nope, v_dim = rng.choice(space.sizes)
    dtype, kv_dtype = rng.choice(space.dtypes)
    masks = {"verify": (None, "tree"), "extend": (None, None, "random")}.get(mode, (None,))
    return MLACase(
        mode=mode,
        prefix_lens=prefix,
        extend_lens=tuple(extend),
        num_decode=num_decode,
        page_size=page,
        layout=rng.choice(("NHD", "HND")),
        slot_layout=rng.choice(("contiguous", "shuffled_pages", "interleaved", "non_monotonic")),
        num_q_heads=rng.choice(space.heads),
        rank=rank,
        rope=rope,
        nope=nope,
        v_dim=v_dim,
        dtype=dtype,
        kv_dtype=kv_dtype,
        method=rng.choice(space.methods),
        chunk_tokens=rng.choice((1, 7, 16, 64)),
        window=rng.choice(space.windows),
        logit_cap=rng.choice(space.caps),
        sinks=rng.choice(space.sinks),
        scale=rng.choice((None, None, 0.3)),
        kv_scale=rng.choice(space.kv_scales),
        mask=rng.choice(masks),
        apart=rng.random() < 0.4,
        strided=rng.random() < 0.4,
        flat=rng.random() < 0.3,
        give_out=rng.random() < 0.3,
        return_lse=rng.random() < 0.7,
        kv=rng.choice(space.kv_sources),
        device_ints=rng.random() < 0.3,
        padding=rng.choice((0, 0, 2)) if mode in ("decode", "extend") else 0,
        seed=rng.randrange(2**31),
    )


def _edge(rng: random.Random, page: int, limit: int) -> int:
    """A length next to a page's edge, or any at all; 0 .. limit."""
    near = [n for n in (0, 1, page - 1, page, page + 1, 2 * page, 2 * page + 1) if 0 <= n <= limit]
    return rng.choice(near) if rng.random() < 0.7 else rng.randint(0, limit)
