"""The engine on a small random Gemma: a dual pool changes nothing but the memory; needs no weights."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from anyattn.demo.engine import Engine, EngineConfig
from anyattn.demo.gemma import GemmaModel
from anyattn.demo.gemma_weights import GemmaCheckpoint, GemmaConfig
from anyattn.demo.sampler import SamplingParams
from anyattn.errors import ConfigError

CONFIG = GemmaConfig(
    num_layers=6,
    hidden_size=32,
    num_q_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_context=128,
    window=9,
    rope_theta=1e6,
    norm_eps=1e-6,
)
FFN, VOCAB = 48, 71
ENGINE = EngineConfig(
    max_batch=4,
    max_context=96,
    page_size=4,
    backend="torch_native",
    prefix_reuse=False,
    chunk=17,
    page_seed=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def model() -> GemmaModel:
    generator = torch.Generator().manual_seed(1)
    heads, kv = CONFIG.num_q_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    hidden = CONFIG.hidden_size
    shapes = {
        "attn_q": (heads, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden),
        "attn_output": (hidden, heads), "ffn_gate": (FFN, hidden), "ffn_up": (FFN, hidden),
        "ffn_down": (hidden, FFN),
    }  # fmt: skip
    norms = {"attn_norm": hidden, "post_attention_norm": hidden, "ffn_norm": hidden, "post_ffw_norm": hidden}
    norms |= {"attn_q_norm": CONFIG.head_dim, "attn_k_norm": CONFIG.head_dim}
    tensors = {
        "token_embd.weight": torch.randn(VOCAB, hidden, generator=generator),
        "output_norm.weight": torch.rand(hidden, generator=generator) + 0.5,
    }
    for layer in range(CONFIG.num_layers):
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = torch.randn(*shape, generator=generator) / shape[1] ** 0.5
        for name, size in norms.items():
            tensors[f"blk.{layer}.{name}.weight"] = torch.rand(size, generator=generator) + 0.5
    return GemmaModel(GemmaCheckpoint(CONFIG, tensors))


def run(model: GemmaModel, config: EngineConfig) -> tuple[list[tuple[int, ...]], Engine]:
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (40, 3, 9, 10, 25, 1)]
    engine = Engine(model, config)
    found = engine.generate(prompts, SamplingParams(max_new_tokens=30, ignore_eos=True))
    return [c.ids for c in found], engine


def test_dual_pool_one_pool_and_a_starved_pool_agree(model: GemmaModel) -> None:
    expected, _ = run(model, ENGINE)
    dual, engine = run(model, replace(ENGINE, dual_pool=True))
    assert dual == expected
    starved, tight = run(model, replace(ENGINE, dual_pool=True, kv_tokens=112))
    assert starved == expected
    assert tight.scheduler.preemptions > 0
    for made in (engine, tight):
        assert made.windows is not None
        assert made.windows.num_free == made.windows.num_pages
        assert made.windows.window_free(9) * 4 == made.windows.pool.window_slots[9]


def test_shared_prefixes_and_dual_pools_exclude_each_other(model: GemmaModel) -> None:
    with pytest.raises(ConfigError, match="shared prefix"):
        Engine(model, replace(ENGINE, dual_pool=True, prefix_reuse=True))


def test_contexts_that_cannot_be(model: GemmaModel) -> None:
    with pytest.raises(ConfigError, match="context"):
        GemmaModel(GemmaCheckpoint(CONFIG, {}), max_context=129)
    assert [s.sliding_window for s in model.specs] == [9, 9, 9, 9, 9, None]
