"""The engine on a small random model against a plain float64 decoder without any cache; needs no weights.

Runs on the CPU and, where there is one, on a CUDA device.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from anyattn.core.batch import ForwardMode
from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.model import LlamaModel
from anyattn.demo.sampler import SamplingParams
from anyattn.demo.weights import Checkpoint, LlamaConfig

CONFIG = LlamaConfig(
    num_layers=3,
    hidden_size=64,
    ffn_size=96,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=97,
    max_context=256,
    rope_theta=1e4,
    norm_eps=1e-5,
)
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
]
TIE = 1e-3


@functools.cache
def random_checkpoint() -> Checkpoint:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    hidden, kv = CONFIG.hidden_size, CONFIG.num_kv_heads * CONFIG.head_dim
    tensors = {
        "token_embd.weight": matrix(CONFIG.vocab_size, hidden, 8.0),
        "output_norm.weight": torch.rand(hidden, generator=generator) + 0.5,
    }
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (CONFIG.ffn_size, hidden),
        "ffn_up": (CONFIG.ffn_size, hidden),
        "ffn_down": (hidden, CONFIG.ffn_size),
    }
    for layer in range(CONFIG.num_layers):
        for name, (rows, columns) in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = matrix(rows, columns, 2.0)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = torch.rand(hidden, generator=generator) + 0.5
    return Checkpoint(CONFIG, tensors, {})


def plain_logits(tokens: list[int]) -> torch.Tensor:
    """The last token's logits, float64, everything recomputed from the formulas."""
    w = {name: tensor.double() for name, tensor in random_checkpoint().tensors.items()}
    length, dim = len(tokens), CONFIG.head_dim

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + CONFIG.norm_eps).sqrt() * weight

    def heads(x: torch.Tensor, rotate: bool) -> torch.Tensor:
        x = x.view(length, -1, dim).transpose(0, 1)
        if not rotate:
            return x
        angle = torch.arange(length)[:, None] * CONFIG.rope_theta ** (-torch.arange(0, dim, 2).double() / dim)
        turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(angle * 0 + 1, angle)
        return torch.cat([turned.real, turned.imag], -1)

    x = w["token_embd.weight"][tokens]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for layer in range(CONFIG.num_layers):
        p = {n.split(".")[2]: t for n, t in w.items() if n.startswith(f"blk.{layer}.")}
        y = norm(x, p["attn_norm"])
        q, k, v = (heads(y @ p[f"attn_{n}"].T, n != "v") for n in "qkv")
        k, v = (t.repeat_interleave(CONFIG.num_q_heads // CONFIG.num_kv_heads, 0) for t in (k, v))
        scores = (q @ k.transpose(1, 2) / dim**0.5).masked_fill(~causal, -torch.inf)
        x = x + (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ p["attn_output"].T
        y = norm(x, p["ffn_norm"])
        x = x + (torch.nn.functional.silu(y @ p["ffn_gate"].T) * (y @ p["ffn_up"].T)) @ p["ffn_down"].T
    return norm(x[-1], w["output_norm.weight"]) @ w["token_embd.weight"].T


def assert_greedy(prompt: list[int], ids: tuple[int, ...], tie: float = TIE) -> None:
    """Each new token is the plain decoder's best for what came before it, or within `tie` of it."""
    tokens = list(prompt)
    for token in ids:
        logits = plain_logits(tokens)
        assert float(logits.max() - logits[token]) <= tie, f"token {token} at length {len(tokens)}"
        tokens.append(token)


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(97) for _ in range(21)]
    tails = [[rng.randrange(97) for _ in range(rng.randrange(1, 20))] for _ in range(6)]
    return [[*head, *tails[0]], [*head, *tails[1]], *tails[2:]]


def test_the_plain_decoder_is_not_degenerate() -> None:
    """Its text depends on what was said: otherwise agreement would mean little."""
    best = {int(plain_logits(p).argmax()) for p in prompts(3)}
    assert len(best) >= 4
    first = prompts(3)[0]
    changed = [first[0] + 1, *first[1:]]
    assert float((plain_logits(first) - plain_logits(changed)).abs().max()) > 0.1


@pytest.mark.parametrize("backend", ["torch_native", None])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 5), (16, 16), (64, None)])
@pytest.mark.parametrize("device", DEVICES)
def test_greedy_text_is_the_plain_decoders(
    device: str, page_size: int, chunk: int | None, backend: str | None
) -> None:
    model = LlamaModel(random_checkpoint(), device=device)
    config = EngineConfig(
        max_batch=4,
        max_context=64,
        page_size=page_size,
        chunk=chunk,
        backend=backend,
        page_seed=1,
    )
    engine = Engine(model, config)
    given = prompts(page_size)
    found = engine.generate(given, SamplingParams(max_new_tokens=9))
    for prompt, completion in zip(given, found, strict=True):
        assert len(completion.ids) == 9
        assert_greedy(prompt, completion.ids)
    assert engine.stats.of(ForwardMode.DECODE).steps > 0
    assert found[1].reused_tokens == 21 // page_size * page_size
    assert engine.pool.device.type == device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICES)
def test_half_types_stay_near(device: str, dtype: torch.dtype) -> None:
    model = LlamaModel(random_checkpoint(), device=device, dtype=dtype)
    engine = Engine(model, EngineConfig(max_batch=4, max_context=64, chunk=16))
    given = prompts(2)
    found = engine.generate(given, SamplingParams(max_new_tokens=6))
    for prompt, completion in zip(given, found, strict=True):
        assert_greedy(prompt, completion.ids, tie=1.5)  # of logits that spread over tens


@pytest.mark.parametrize("device", DEVICES)
def test_a_small_pool_preempts_on_any_device(device: str) -> None:
    model = LlamaModel(random_checkpoint(), device=device)
    config = EngineConfig(max_batch=6, max_context=64, page_size=4, kv_tokens=72, chunk=16)
    engine = Engine(model, config)
    given = prompts(5)
    found = engine.generate(given, SamplingParams(max_new_tokens=16))
    for prompt, completion in zip(given, found, strict=True):
        assert_greedy(prompt, completion.ids)
    assert engine.scheduler.preemptions > 0


def test_a_model_with_a_head_of_its_own_uses_it() -> None:
    tied = random_checkpoint()
    head = tied.tensors["token_embd.weight"].flip(0)
    untied = replace(tied, tensors={**tied.tensors, "output.weight": head})
    config = EngineConfig(max_batch=1, max_context=64)
    params = SamplingParams(max_new_tokens=1)
    first = [Engine(LlamaModel(c), config).generate([[1, 2, 3]], params)[0].ids[0] for c in (tied, untied)]
    assert first[1] == 96 - first[0]
