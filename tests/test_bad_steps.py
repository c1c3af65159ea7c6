"""Bad batches and calls: nothing is silently dropped, substituted or reshaped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_input_tools import SPEC, Engine, extend, refused

import anyattn
from anyattn import errors


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def test_the_unspoilt_call_works(engine: Engine) -> None:
    assert engine.call().shape == (3, 4, 16)


# -- batches ---------------------------------------------------------------------------------------------

Build = Callable[[], anyattn.ForwardBatch]
ForwardBatch = anyattn.ForwardBatch


def _lens_elsewhere() -> anyattn.Exact:
    return anyattn.Exact(torch.tensor([6], device="meta"), torch.tensor([3], device="meta"))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: ForwardBatch.extend([], [], [], []), ("idle()",)),
        (lambda: ForwardBatch.decode([], [], []), ("idle()",)),
        (lambda: extend(prefix_lens=[3, 4]), ("prefix_lens", "2", "1")),
        (lambda: extend(extend_lens=[3, 4]), ("extend_lens",)),
        (lambda: extend(out_cache_loc=[7, 8]), ("out_cache_loc", "3", "2")),
        (lambda: extend(positions=[3, 4]), ("positions",)),
        (lambda: extend(encoder_lens=[3, 4]), ("encoder_lens",)),
        (lambda: extend(prefix_lens=[-1]), ("prefix_lens", "-1")),
        (lambda: extend(extend_lens=[-3]), ("extend_lens", "-3")),
        (lambda: ForwardBatch.decode([1], [0], [7]), ("seq_lens",)),
        (lambda: ForwardBatch.decode([1, 2], [4], [7, 20]), ("disagrees",)),
        (
            lambda: ForwardBatch.mixed([1, 2], [3, 2], [3, 2], [7, 8, 9, 22, 23], num_decode=1),
            ("stand last",),
        ),
        (lambda: ForwardBatch.mixed([1], [3], [1], [7], num_decode=2), ("num_decode",)),
        (lambda: ForwardBatch.mixed([1], [3], [1], [7], num_decode=-1), ("num_decode",)),
        (lambda: extend(num_padding_requests=2), ("num_padding_requests",)),
        (lambda: extend(num_padding_tokens=-1, out_cache_loc=[7, 8]), ("num_padding_tokens",)),
        (lambda: extend(prefix_lens=torch.tensor([3.0])), ("integer",)),
        (lambda: extend(prefix_lens=torch.tensor([[3]])), ("rank 2",)),
        (lambda: extend(prefix_lens=[3.5]), ("prefix_lens",)),
        (
            lambda: extend(host_lens=anyattn.Exact(torch.tensor([5]), torch.tensor([3]))),
            ("host_lens",),
        ),
        (lambda: extend(host_lens=anyattn.UpperBound(max_seq_len=5, max_extend_len=3)), ("host_lens",)),
        (lambda: extend(host_lens=anyattn.Exact([6], [3])), ("list", "torch.tensor")),  # type: ignore[arg-type]
        (lambda: extend(host_lens=_lens_elsewhere()), ("meta", "on the CPU")),
        (lambda: extend(host_lens="copied"), ("'copied'", "UpperBound")),
        (lambda: extend(host_lens=[6]), ("[6]", "UpperBound")),
        (lambda: extend(prefix_lens=torch.tensor([3 + 1j])), ("prefix_lens", "complex64")),
        (lambda: extend(prefix_lens=[2**63 - 1]), ("prefix_lens + extend_lens",)),
        (lambda: extend(num_padding_requests=None), ("num_padding_requests", "None")),
        (lambda: extend(num_padding_tokens="1"), ("num_padding_tokens", "'1'")),
        (lambda: extend(num_padding_requests=0.5), ("num_padding_requests", "0.5")),
        (lambda: extend(mode="decode"), ("mode", "'decode'", "ForwardMode.DECODE")),
        (lambda: extend(mode=anyattn.ForwardMode.DECODE), ("one new token", "[3]")),
        (lambda: extend(mask=torch.ones(3, 6, dtype=torch.bool)), ("Tensor", "from_matrices")),
    ],
)
def test_sizes_that_disagree(build: Build, words: tuple[str, ...]) -> None:
    with refused(errors.BatchError, *words):
        build()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: extend(req_pool_indices=[4]), ("req_pool_indices", "4", "0..3")),
        (lambda: extend(req_pool_indices=[-1]), ("req_pool_indices", "-1")),
        (lambda: extend(prefix_lens=[30]), ("seq_lens", "33", "0..32")),
        (lambda: extend(out_cache_loc=[0, 8, 9]), ("page 0", "0", "4..67")),
        (lambda: extend(out_cache_loc=[3, 8, 9]), ("page 0", "3")),
        (lambda: extend(out_cache_loc=[7, 8, 68]), ("beyond the pool", "68", "4..67")),
        (lambda: extend(out_cache_loc=[7, 8, 7]), ("twice", "7")),
        (lambda: ForwardBatch.decode([1, 1], [4, 4], [7, 7]), ("twice", "7")),
        (lambda: extend(encoder_lens=[9]), ("encoder_lens", "9", "0..8")),
        (lambda: extend(encoder_lens=[2], encoder_out_cache_loc=[0, 36]), ("page 0",)),
        (lambda: extend(encoder_lens=[2], encoder_out_cache_loc=[36, 36]), ("twice",)),
        (lambda: extend(encoder_lens=[2], encoder_out_cache_loc=[36, 37, 38]), ("encoder_out_cache_loc",)),
        (lambda: extend(encoder_lens=[2], encoder_out_cache_loc=[9, 36]), ("twice", "9")),
        (
            lambda: extend(mask=anyattn.ExplicitMask.from_matrices([torch.ones(3, 5, dtype=torch.bool)])),
            ("mask", "15", "18"),
        ),
    ],
)
def test_steps_that_do_not_fit_the_tables(engine: Engine, build: Build, words: tuple[str, ...]) -> None:
    with refused(errors.BatchError, *words):
        engine.plan(build())


def test_full_checks_read_the_table(engine: Engine) -> None:
    """A live token in page 0, and new tokens that the table puts elsewhere."""
    assert engine.backend.compiler.checks == "full"
    with refused(errors.BatchError, "row 1", "position 16", "4..67"):
        engine.plan(extend(prefix_lens=[14], out_cache_loc=[18, 19, 50]))
    with refused(errors.BatchError, "disagrees with req_to_token", "token 2"):
        engine.plan(extend(out_cache_loc=[7, 8, 10]))


def test_full_checks_read_the_lengths(engine: Engine) -> None:
    """Of a batch that was written to after it was planned once, and behind a bound that doesn't hold."""
    batch = ForwardBatch.decode([1], [4], [7])
    engine.plan(batch)
    batch.seq_lens.fill_(9)
    assert batch.out_cache_loc is not None
    batch.out_cache_loc.fill_(12)
    with refused(errors.BatchError, "seq_lens", "9", "<= 4"):
        engine.plan(batch)
    loose = ForwardBatch.decode([1], [9], [12]).view(host_lens=anyattn.UpperBound(max_seq_len=8))
    compiler = engine.backend.compiler
    plan = compiler.prepare(loose)
    with refused(errors.BatchError, "seq_lens", "9", "<= 8"):
        compiler.check(plan)


def test_lengths_that_the_host_does_not_have(engine: Engine) -> None:
    bound = anyattn.UpperBound(max_seq_len=8, max_extend_len=4)
    with refused(errors.HostLengthError, "torch_native", "UpperBound", "Exact", 'host_lens="copy"'):
        engine.plan(extend(host_lens=bound))


# -- calls -----------------------------------------------------------------------------------------------


def test_forward_without_a_context(engine: Engine) -> None:
    with refused(errors.ContextError, "init_forward_metadata", without="asked allowed"):
        engine.layer(torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16), extend())


def test_forward_with_another_batchs_plan(engine: Engine) -> None:
    old = engine.plan(extend())
    with anyattn.forward_context(engine.backend, old), refused(errors.PlanError, "another batch"):
        engine.layer(torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16), extend())


def test_forward_with_another_backends_plan(engine: Engine) -> None:
    batch, other = extend(), Engine()
    with (
        anyattn.forward_context(engine.backend, other.plan(batch)),
        refused(errors.PlanError, "another backend"),
    ):
        engine.layer(torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16), batch)


def test_layer_with_more_heads_than_planned(engine: Engine) -> None:
    wide = anyattn.AttentionLayer(dataclasses.replace(SPEC, num_q_heads=8), 0)
    with refused(errors.PlanError, "8", "<= 4"):
        engine.call(q=torch.randn(3, 8, 16), layer=wide)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": 4},
        {"logit_cap": 30.0},
        {"scale": 0.5},
        {"num_kv_heads": 1},
        {"kind": anyattn.AttentionKind.BIDIRECTIONAL},
    ],
)
def test_layer_of_a_kind_that_was_not_planned(engine: Engine, change: dict[str, Any]) -> None:
    spec = anyattn.AttentionSpec(**({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} | change))
    with refused(errors.PlanError, "AttentionSpec"):
        engine.call(layer=anyattn.AttentionLayer(spec, 0))


def test_layer_number_beyond_the_model(engine: Engine) -> None:
    with refused(errors.PoolError, "layer_id", "1", "0..0"):
        engine.call(layer=anyattn.AttentionLayer(SPEC, 1))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layer_numbers_swapped(layout: str) -> None:
    """Both specs are planned, but layer 1's KV has another shape than layer 0's."""
    small = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=16)
    engine = Engine([SPEC, small], layout=layout)
    with refused(errors.PlanError, "layer 0"):
        engine.call(k=torch.randn(3, 1, 16), v=torch.randn(3, 1, 16), layer=anyattn.AttentionLayer(small, 0))


def test_sinks_must_be_there_exactly_if_declared() -> None:
    with refused(errors.ConfigError, "sinks"):
        anyattn.AttentionLayer(dataclasses.replace(SPEC, sinks=True), 0)
    with refused(errors.ConfigError, "sinks"):
        anyattn.AttentionLayer(SPEC, 0, sinks=torch.zeros(4))
    with refused(errors.ConfigError, "sinks", "[4]"):
        anyattn.AttentionLayer(dataclasses.replace(SPEC, sinks=True), 0, sinks=torch.zeros(2))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"q": torch.randn(2, 4, 16)}, ("shape of q", "(2, 4, 16)", "[3, 4, 16]")),
        ({"q": torch.randn(3, 2, 32)}, ("shape of q",)),
        ({"q": torch.randn(3, 32)}, ("shape of q",)),
        ({"q": torch.randn(3, 4, 16, 1)}, ("shape of q",)),
        ({"q": torch.randn(4, 3, 16).transpose(0, 1).transpose(1, 2)}, ("shape of q",)),
        ({"q": torch.randn(3, 16, 4).transpose(1, 2)}, ("contiguous",)),
        ({"k": torch.randn(3, 4, 16)}, ("shape of k", "[3, 2, 16]")),
        ({"k": torch.randn(2, 2, 16)}, ("shape of k",)),
        ({"k": torch.randn(1, 2, 16), "v": torch.randn(1, 2, 16)}, ("shape of k",)),
        ({"v": torch.randn(3, 2, 8)}, ("shape of v",)),
        ({"q": torch.randn(3, 4, 16).double()}, ("dtype of q", "float64", "float32")),
        ({"k": torch.randn(3, 2, 16).bfloat16()}, ("dtype of k",)),
        ({"v": torch.randn(3, 2, 16).half()}, ("dtype of v",)),
        ({"out": torch.empty(3, 64)}, ("out", "(3, 64)", "(3, 4, 16)")),
        ({"out": torch.empty(3, 4, 16).bfloat16()}, ("out", "bfloat16")),
        ({"out": torch.empty(4, 4, 16)}, ("out",)),
        ({"lse_out": torch.empty(3, 4)}, ("return_lse",)),
        ({"lse_out": torch.empty(4, 3), "return_lse": True}, ("lse_out", "(4, 3)", "(3, 4)")),
        ({"lse_out": torch.empty(3, 4).double(), "return_lse": True}, ("lse_out", "float64")),
    ],
)
def test_call_with_tensors_that_do_not_fit(
    engine: Engine, inputs: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(errors.BatchError, *words):
        engine.call(**inputs)


def test_k_without_v(engine: Engine) -> None:
    batch = extend()
    with (
        anyattn.forward_context(engine.backend, engine.plan(batch)),
        refused(errors.BatchError, "k and v"),
    ):
        engine.layer(torch.randn(3, 4, 16), torch.randn(3, 2, 16), None, batch)


def test_layer_inputs_that_nobody_declared(engine: Engine) -> None:
    indices = torch.zeros(3, 8, dtype=torch.int32)
    with refused(errors.FeatureError, "torch_native", "topk_indices"):
        engine.call(inputs=anyattn.LayerInputs(topk_indices=indices))
    with refused(errors.FeatureError, "q_rope"):
        engine.call(inputs=anyattn.LayerInputs(q_rope=torch.zeros(3, 4, 8)))
    with pytest.raises(TypeError, match="top_k"):
        anyattn.LayerInputs(top_k=indices)


def test_storing_without_slots(engine: Engine) -> None:
    with refused(errors.BatchError, "out_cache_loc", "save_kv_cache=False"):
        engine.call(extend(out_cache_loc=None))


def test_keys_for_a_layer_that_shares_anothers() -> None:
    """They would be dropped: the shared layer has no storage."""
    shared = dataclasses.replace(SPEC, kv_shared_with=0)
    engine = Engine([SPEC, shared])
    with refused(errors.BatchError, "layer 1", "shares"):
        engine.call(layer=anyattn.AttentionLayer(shared, 1))


def test_cached_prefix_for_an_encoder_only_layer() -> None:
    """It attends within the step: a prefix would be dropped."""
    spec = dataclasses.replace(SPEC, kind=anyattn.AttentionKind.ENCODER_ONLY)
    engine = Engine([spec])
    assert engine.call(extend(prefix_lens=[0], out_cache_loc=None)).shape == (3, 4, 16)
    with refused(errors.BatchError, "encoder-only", "3"):
        engine.call(extend(out_cache_loc=None))


def test_cross_attention_without_an_encoder() -> None:
    spec = dataclasses.replace(SPEC, kind=anyattn.AttentionKind.CROSS)
    engine = Engine([spec])
    with refused(errors.BatchError, "encoder_lens"):
        engine.plan(extend())
    batch = extend(encoder_lens=[2])
    with refused(errors.BatchError, "encoder_out_cache_loc"):
        engine.call(batch, k=torch.randn(2, 2, 16), v=torch.randn(2, 2, 16))
