"""Bad input: every mistake is an error of its class that names what was asked, what is allowed, what next.

Nothing is silently dropped, substituted or reshaped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import anyattn
from anyattn import errors
from anyattn.core.facts import HostFacts, LibraryFacts, LibraryState
from anyattn.core.select.decision import Degraded
from anyattn.detect import simulate

SPEC = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
LIMITS = anyattn.Limits(max_requests=4, max_tokens=64, max_context=32)


@contextmanager
def refused(kind: type[errors.AnyattnError], *words: str, without: str = "") -> Iterator[None]:
    """The block raises exactly this class, with asked / allowed / next, and these words in the text.

    `without` names the part that can't be there ("allowed" where nothing is).
    """
    with pytest.raises(errors.AnyattnError) as caught:
        yield
    error = caught.value
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    for part, value in (("asked", error.asked), ("allowed", error.allowed), ("next", error.hint)):
        assert value is not None or part in without, f"no {part!r} in: {error}"
    for word in words:
        assert word in str(error), f"{word!r} is missing in: {error}"


def select(**changes: Any) -> anyattn.Decision:
    options = {
        "dtype": torch.float32,
        "device": "cpu",
        "backend": "torch_native",
        "page_size": 4,
        "limits": LIMITS,
    }
    return anyattn.select([SPEC], **(options | changes))


class Engine:
    """A ready backend with one request of 6 tokens in row 1, slots 4 .. 9 and room for more."""

    def __init__(self, specs: list[anyattn.AttentionSpec] | None = None, **changes: Any) -> None:
        options = {"dtype": torch.float32, "device": "cpu", "backend": "torch_native", "page_size": 4}
        self.specs = specs or [SPEC]
        self.decision = anyattn.select(self.specs, **(options | changes))
        self.pool = anyattn.kv.create_pool(self.decision, num_slots=64)
        self.table = anyattn.kv.RequestTable(max_requests=4, max_context=32, device="cpu", max_encoder=8)
        self.table.req_to_token[1, :16] = torch.arange(4, 20)
        self.table.req_to_token[2, :16] = torch.arange(20, 36)
        self.table.encoder_to_token[1, :8] = torch.arange(36, 44)
        self.backend = anyattn.create_backend(self.decision, self.pool, self.table)
        self.layer = anyattn.AttentionLayer(self.specs[0], 0)

    def plan(self, batch: anyattn.ForwardBatch) -> Any:
        return self.backend.init_forward_metadata(batch)

    def call(
        self,
        batch: anyattn.ForwardBatch | None = None,
        *,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        layer: anyattn.AttentionLayer | None = None,
        **options: Any,
    ) -> Any:
        """An extend of 3 tokens, with whatever the test replaces."""
        batch = batch or extend()
        q = torch.randn(3, 4, 16) if q is None else q
        k = torch.randn(3, 2, 16) if k is None else k
        v = torch.randn(3, 2, 16) if v is None else v
        with anyattn.forward_context(self.backend, self.plan(batch)):
            return (layer or self.layer)(q, k, v, batch, **options)


def extend(**changes: Any) -> anyattn.ForwardBatch:
    fields = {
        "req_pool_indices": [1],
        "prefix_lens": [3],
        "extend_lens": [3],
        "out_cache_loc": [7, 8, 9],
    }
    return anyattn.ForwardBatch.extend(**(fields | changes))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine()


def test_the_unspoilt_call_works(engine: Engine) -> None:
    assert engine.call().shape == (3, 4, 16)


# -- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "suggestion"),
    [
        ("backend", "torch_natve", "torch_native"),
        ("prefill", "flash_infer", "flashinfer"),
        ("decode", "trton", "triton"),
        ("verify", "f4", "fa4"),
        ("draft", "torchnative", "torch_native"),
        ("layout", "NDH", "NHD"),
        ("dtype", "flaot32", "float32"),
        ("kv_dtype", "float8_e4m3", "float8_e4m3fn"),
        ("features", ["widow"], "window"),
        ("deterministic", "batch_invariant", "batch-invariant"),
        ("kind", "line", "linear"),
        ("host", "rcom:gfx942", "rocm:gfx942"),
        ("host", "cuda:sm91", "cuda:sm90"),
    ],
)
def test_unknown_name_suggests_the_nearest(option: str, value: Any, suggestion: str) -> None:
    changes = {"device": None, "backend": None} if option == "host" else {}
    with refused(errors.UnknownNameError, f"did you mean {suggestion!r}"):
        select(**{**changes, option: value})


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="pagesize"):
        select(pagesize=4)


@pytest.mark.parametrize(
    ("name", "value", "kind", "words"),
    [
        ("ANYATTN_BACKEDN", "triton", errors.UnknownNameError, "did you mean 'ANYATTN_BACKEND'"),
        ("ANYATTN_BACKEND", "torch_natve", errors.UnknownNameError, "did you mean 'torch_native'"),
        ("ANYATTN_DECODE_BACKEND", "flashinfr", errors.UnknownNameError, "did you mean 'flashinfer'"),
        ("ANYATTN_CHECKS", "ful", errors.ConfigError, "off, host, full"),
        ("ANYATTN_PAGE_SIZE", "sixteen", errors.ConfigError, "ANYATTN_PAGE_SIZE"),
        ("ANYATTN_PAGE_SIZE", "0", errors.ConfigError, "ANYATTN_PAGE_SIZE"),
        ("ANYATTN_ASSUME", "cuda:sm9", errors.UnknownNameError, "cuda:sm90"),
    ],
)
def test_environment(
    name: str, value: str, kind: type[errors.AnyattnError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with refused(kind, words):
        select(backend=None, page_size=None, device=None)


# -- backends that can't ---------------------------------------------------------------------------------


def test_explicit_backend_of_other_hardware_is_refused_with_who_can() -> None:
    with refused(errors.SelectionError, "fa3", "cpu", "torch_native"):
        select(backend="fa3")


def test_explicit_backend_without_the_head_size_is_refused() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=80)
    with refused(errors.SelectionError, "flashinfer", "head", "80"):
        anyattn.select(spec, dtype="bfloat16", host="cuda:sm90", backend="flashinfer")


def test_unsupported_dtypes() -> None:
    with refused(errors.UnknownNameError, "int32", "float32"):
        select(dtype=torch.int32)
    with refused(errors.SelectionError, "float64", "float32"):
        select(dtype=torch.float64)
    with refused(errors.SelectionError, "int8"):
        select(kv_dtype=torch.int8)


def test_feature_that_the_backend_lacks() -> None:
    with refused(errors.SelectionError, "alibi", "torch_native"):
        select(features=[anyattn.Feature.ALIBI])
    with refused(
        errors.SelectionError, "torch_native: feature: asked alibi, allowed", without="asked allowed"
    ):
        select(backend=None, features=["alibi"])


def broken_host(reason: str = "libfoo.so.1: cannot open shared object file") -> HostFacts:
    facts = simulate("cuda:sm90")
    library = facts.library("flashinfer-python")
    broken = dataclasses.replace(library, state=LibraryState.BROKEN, reason=reason)
    return dataclasses.replace(facts, libraries={**facts.libraries, "flashinfer-python": broken})


def test_broken_library_auto_goes_on_and_says_why() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    decision = anyattn.select(spec, dtype="bfloat16", host=broken_host())
    chosen = {decision.prefill.backend, decision.decode.backend}
    assert "flashinfer" not in chosen
    (verdict,) = {
        c.verdict for c in decision.candidates if c.backend == "flashinfer" and c.phase.value == "decode"
    }
    assert "libfoo.so.1" in str([str(r) for r in verdict.reasons])


def test_broken_library_explicit_refuses() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    with refused(errors.SelectionError, "flashinfer", "libfoo.so.1"):
        anyattn.select(spec, dtype="bfloat16", host=broken_host(), backend="flashinfer")


def test_head_size_that_nobody_serves_gets_the_reference_with_a_reason() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=72, v_head_dim=40)
    decision = anyattn.select(spec, dtype="float32", host="cuda:sm80")
    assert decision.decode.backend == "torch_native"
    assert isinstance(decision.decode.verdict, Degraded)


def test_library_that_fails_at_build_time_is_a_typed_error(engine: Engine) -> None:
    choice = dataclasses.replace(engine.decision.prefill, target="anyattn.backends.reference.nowhere:Missing")
    decision = dataclasses.replace(engine.decision, prefill=choice)
    with refused(errors.BackendBuildError, "torch_native", "nowhere", "doctor", without="allowed"):
        anyattn.create_backend(decision, engine.pool, engine.table)


def test_simulated_decision_without_an_adapter_builds_nothing(engine: Engine) -> None:
    choice = dataclasses.replace(engine.decision.prefill, target=None, built=False)
    decision = dataclasses.replace(engine.decision, prefill=choice)
    with refused(errors.BackendBuildError, "torch_native", "no adapter", without="allowed"):
        anyattn.create_backend(decision, engine.pool, engine.table)


# -- pools and tables ------------------------------------------------------------------------------------


def test_pool_sizes_and_scales(engine: Engine) -> None:
    with refused(errors.PoolError, "multiple of 4", "num_slots=12"):
        anyattn.kv.create_pool(engine.decision, num_slots=10)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with refused(errors.PoolError, "KV scale"):
            anyattn.kv.create_pool(engine.decision, num_slots=8, k_scale=scale)
    with refused(errors.PoolError, "per KV head"):
        anyattn.kv.create_pool(engine.decision, num_slots=8, v_scale=[1.0, 1.0, 1.0])


def test_pool_of_another_decision(engine: Engine) -> None:
    other = select(page_size=8)
    with refused(errors.PoolError, "page size"):
        anyattn.create_backend(other, engine.pool, engine.table)
    wider = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=4, head_dim=16)
    other = anyattn.select([wider], dtype=torch.float32, device="cpu", page_size=4, backend="torch_native")
    with refused(errors.PoolError, "other layers"):
        anyattn.create_backend(other, engine.pool, engine.table)


def test_request_table_sizes() -> None:
    with refused(errors.PoolError, "request table"):
        anyattn.kv.RequestTable(max_requests=0, max_context=4)


# -- batches ---------------------------------------------------------------------------------------------

Build = Callable[[], anyattn.ForwardBatch]
ForwardBatch = anyattn.ForwardBatch


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


# -- data types ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"num_q_heads": 0},
        {"num_q_heads": 3},
        {"head_dim": -1},
        {"v_head_dim": -8},
        {"sliding_window": 0},
        {"logit_cap": 0.0},
        {"scale": float("nan")},
        {"mla": anyattn.MLASpec()},
    ],
)
def test_impossible_specs(change: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        anyattn.AttentionSpec(**({"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16} | change))


def test_impossible_limits() -> None:
    with pytest.raises(errors.ConfigError, match="max_tokens"):
        anyattn.Limits(max_requests=1, max_tokens=0, max_context=4)
    with pytest.raises(errors.ConfigError, match="max_draft_tokens"):
        anyattn.Limits(max_requests=1, max_tokens=1, max_context=4, max_draft_tokens=-1)


def test_missing_library_facts_are_missing_not_broken() -> None:
    assert LibraryFacts("x").state is LibraryState.UNKNOWN
    assert HostFacts("cpu", "avx2").library("flashinfer-python").state is LibraryState.MISSING
