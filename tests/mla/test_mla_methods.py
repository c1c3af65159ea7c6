"""Which method a plan takes, the whole form of inputs, and what is refused."""

from typing import Any

import pytest
import torch

import anyattn
from anyattn import errors
from anyattn.core.batch import UpperBound
from anyattn.core.capabilities import CapabilityRow, FormSpec, HeadDims, PageSizes
from anyattn.core.contract import AttentionBackend
from anyattn.core.mla import MLAMethod, MLAPolicy, expansion_pays, methods_of, out_size
from anyattn.core.mla_keys import prefix_chunks
from anyattn.core.mla_layer import MLAAttention, MLAProjections
from anyattn.core.wrappers.hybrid import HybridBackend
from anyattn.testing.mla_cases import MLACase

ABSORBED, MATERIALISED, CHUNKED = MLAMethod
SPEC = MLACase(num_q_heads=2).spec()


class Engine:
    """One latent layer of rank 64 + 16, pages of 4, three requests of 40 slots."""

    def __init__(self, **options: Any) -> None:
        policy = options.pop("mla", None)
        self.decision = anyattn.select(
            [SPEC], dtype="float32", device="cpu", page_size=4, backend="torch_native", **options
        )
        self.pool = anyattn.kv.create_pool(self.decision, num_slots=120)
        self.table = anyattn.kv.RequestTable(max_requests=3, max_context=40)
        for row in range(3):
            self.table.req_to_token[row] = torch.arange(40) + 4 + 40 * row
        self.backend = anyattn.create_backend(self.decision, self.pool, self.table, mla=policy)
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(2, 16, 64, generator=generator) / 8 for _ in range(2)]
        self.projections = MLAProjections(*weights)

    def slots(self, row: int, start: int, stop: int) -> list[int]:
        return list(range(4 + 40 * row + start, 4 + 40 * row + stop))

    def extend(self, prefix: int, new: int, **fields: Any) -> anyattn.ForwardBatch:
        return anyattn.ForwardBatch.extend(
            [0], [prefix], [new], self.slots(0, prefix, prefix + new), **fields
        )

    def method(self, batch: anyattn.ForwardBatch) -> MLAMethod | None:
        method: MLAMethod | None = self.backend.init_forward_metadata(batch).mla_method
        return method

    def call(self, batch: anyattn.ForwardBatch, q: torch.Tensor, *rest: Any, **options: Any) -> Any:
        layer = anyattn.AttentionLayer(SPEC, 0, mla_expand=options.pop("expand", self.projections))
        with anyattn.forward_context(self.backend, self.backend.init_forward_metadata(batch)):
            return layer(q, *rest, batch, **options)


def test_the_cheaper_method_is_taken() -> None:
    mla = anyattn.MLASpec()
    assert expansion_pays(mla, [0], [4096])
    assert expansion_pays(mla, [4096], [1024])
    assert not expansion_pays(mla, [4096], [1])
    assert not expansion_pays(mla, [4096], [160])
    assert not expansion_pays(mla, [100_000] * 63 + [0], [1] * 63 + [512])
    assert expansion_pays(mla, [100_000, 0], [0, 2])  # who adds nothing expands nothing


def test_methods_by_mode_and_lengths() -> None:
    engine = Engine(limits=anyattn.Limits(3, 30, 40, max_draft_tokens=4))
    assert engine.method(engine.extend(0, 12)) is MATERIALISED
    assert engine.method(engine.extend(8, 1)) is ABSORBED
    assert engine.method(anyattn.ForwardBatch.decode([0], [9], [12])) is ABSORBED
    assert engine.method(anyattn.ForwardBatch.verify([0], [0], [4], engine.slots(0, 0, 4))) is ABSORBED
    assert engine.method(anyattn.ForwardBatch.idle()) is ABSORBED
    engine.backend.mla.policy = MLAPolicy(method=ABSORBED)
    assert engine.method(engine.extend(0, 12)) is ABSORBED
    engine.backend.mla.policy = MLAPolicy(method=MATERIALISED, chunk_tokens=3)
    assert engine.method(engine.extend(8, 1)) is CHUNKED
    plan = engine.backend.init_forward_metadata(engine.extend(8, 1))
    assert [part.total for part in plan.mla_keys.prefix] == [3, 3, 2]
    assert plan.mla_keys.prefix[2].slots.tolist() == engine.slots(0, 6, 8)


def test_a_request_that_adds_nothing_expands_nothing() -> None:
    engine = Engine(mla=MLAPolicy(method=MATERIALISED))
    batch = anyattn.ForwardBatch.extend([0, 1], [8, 6], [0, 2], engine.slots(1, 6, 8))
    plan = engine.backend.init_forward_metadata(batch)
    assert [part.lens for part in plan.mla_keys.prefix] == [[0, 6]]
    assert plan.mla_keys.prefix[0].slots.tolist() == engine.slots(1, 0, 6)


def test_a_capture_is_absorbed() -> None:
    engine = Engine(mla=MLAPolicy(method=MATERIALISED))
    engine.backend.init_cuda_graph_state(anyattn.Limits(max_requests=2, max_tokens=32, max_context=64))
    plan = engine.backend.init_forward_metadata_out_graph(engine.extend(0, 12), in_capture=True)
    assert plan.mla_method is ABSORBED


def test_dense_plans_have_no_method() -> None:
    spec = anyattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16)
    decision = anyattn.select([spec], dtype="float32", device="cpu", page_size=4, backend="torch_native")
    pool, table = (
        anyattn.kv.create_pool(decision, num_slots=8),
        anyattn.kv.RequestTable(max_requests=1, max_context=4),
    )
    table.req_to_token[0, 0] = 4
    backend = anyattn.create_backend(decision, pool, table)
    assert backend.init_forward_metadata(anyattn.ForwardBatch.decode([0], [1], [4])).mla_method is None
    assert out_size(spec, 16) == 16


@pytest.mark.parametrize(
    ("lens", "limit"), [([7, 0, 3], 4), ([0, 0], 4), ([12], 4), ([1, 1, 1], 64), ([5], 1)]
)
def test_chunks_cover_every_prefix_token_once(lens: list[int], limit: int) -> None:
    seen: list[tuple[int, int]] = []
    for starts, counts in prefix_chunks(lens, limit):
        assert 0 < sum(counts) <= limit
        seen += [(i, s + n) for i, (s, c) in enumerate(zip(starts, counts, strict=True)) for n in range(c)]
    assert seen == [(i, n) for i, length in enumerate(lens) for n in range(length)]


def test_a_row_says_which_methods_exist() -> None:
    spec = anyattn.AttentionSpec(
        num_q_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, scale=0.07, mla=anyattn.MLASpec()
    )

    def row(*pairs: tuple[int, int]) -> CapabilityRow:
        return CapabilityRow(
            phases=(), architectures=(), head_dims=HeadDims(pairs=pairs), dtypes=(), kv_dtypes=(),
            pages=PageSizes(), form=FormSpec("page_csr"),
        )  # fmt: skip

    assert methods_of(row((576, 512)), spec) == {ABSORBED}
    assert methods_of(row((192, 128)), spec) == {MATERIALISED}
    assert methods_of(row((192, 128), (576, 512)), spec) == {ABSORBED, MATERIALISED}


def test_model_code_that_needs_no_branch() -> None:
    """`MLAAttention` gives the same answer by every method."""
    answers = []
    for method in (ABSORBED, MATERIALISED):
        engine = Engine(mla=MLAPolicy(method=method, chunk_tokens=4))
        generator = torch.Generator().manual_seed(3)
        engine.pool.write(0, torch.tensor(engine.slots(0, 0, 9)), torch.randn(9, 1, 80, generator=generator))
        q_nope, q_rope = (torch.randn(5, 2, 16, generator=generator) for _ in range(2))
        latent = torch.randn(5, 1, 80, generator=generator)
        layer, batch = MLAAttention(SPEC, 0, engine.projections), engine.extend(9, 5)
        with anyattn.forward_context(engine.backend, engine.backend.init_forward_metadata(batch)):
            answers.append(layer(q_nope, q_rope, latent, batch))
    assert answers[0].shape == (5, 2, 16)
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-5)


def test_projections_from_a_checkpoint() -> None:
    weight = torch.randn(2 * 32, 64)
    made = MLAProjections.from_kv_b_proj(weight, SPEC)
    latent = torch.randn(3, 64)
    both = (latent @ weight.T).view(3, 2, 32)
    k, v = made(latent)
    torch.testing.assert_close(torch.cat((k, v), dim=2), both)
    with pytest.raises(errors.ConfigError, match="kv_b_proj"):
        MLAProjections.from_kv_b_proj(weight[:-1], SPEC)
    with pytest.raises(errors.ConfigError, match="MLA expansion"):
        MLAProjections(torch.zeros(2, 16, 64), torch.zeros(3, 16, 64))


def refused(error: type[Exception], match: str, engine: Engine, *call: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        engine.call(*call, **options)


def test_bad_calls_are_refused_by_name() -> None:
    engine = Engine(mla=MLAPolicy(method=ABSORBED))
    batch, k = engine.extend(0, 3), torch.zeros(3, 1, 80)
    refused(errors.BatchError, "v of an MLA layer", engine, batch, torch.zeros(3, 2, 80), k, k[..., :64])
    refused(errors.BatchError, "read plan.mla_method", engine, batch, torch.zeros(3, 2, 32), k, None)
    rope = anyattn.LayerInputs(q_rope=torch.zeros(3, 2, 16))
    refused(errors.BatchError, "q and q_rope", engine, batch, torch.zeros(3, 2, 80), k, None, inputs=rope)
    rope = anyattn.LayerInputs(k_rope=torch.zeros(3, 1, 16))
    refused(
        errors.BatchError, "k_rope without k", engine, batch, torch.zeros(3, 2, 80), None, None, inputs=rope
    )
    refused(
        errors.BatchError, "shape of k", engine, batch, torch.zeros(3, 2, 80), torch.zeros(3, 1, 64), None
    )
    assert not engine.pool.latent_cache(0).any()


def test_materialised_without_an_expansion_is_refused() -> None:
    engine = Engine(mla=MLAPolicy(method=MATERIALISED))
    batch, q, k = engine.extend(0, 3), torch.zeros(3, 2, 32), torch.zeros(3, 1, 80)
    refused(errors.ConfigError, "can't run materialised", engine, batch, q, k, None, expand=None)
    short = lambda latent: (latent[:, None, :16], latent[:, None, :16])  # noqa: E731
    refused(errors.ConfigError, "mla_expand", engine, batch, q, k, None, expand=short)
    refused(errors.BatchError, "read plan.mla_method", engine, batch, torch.zeros(3, 2, 80), k, None)


def test_a_backend_that_only_expands_refuses_what_it_cannot() -> None:
    engine = Engine()
    rows = {"head_dims": HeadDims(pairs=((32, 16),))}
    row = engine.backend.config.row
    only = CapabilityRow(**{**{f: getattr(row, f) for f in row.__dataclass_fields__}, **rows})
    engine.backend.mla._row_for = lambda mode: only
    assert engine.method(engine.extend(8, 1)) is CHUNKED
    mask = anyattn.ExplicitMask.from_matrices([torch.ones(1, 9)])
    with pytest.raises(errors.FeatureError, match="any method of latent attention"):
        engine.method(engine.extend(8, 1, mask=mask))


@pytest.mark.parametrize("options", [{"chunk_tokens": 0}, {"method": CHUNKED}])
def test_impossible_policies(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match="MLAPolicy"):
        MLAPolicy(**options)


def test_lengths_that_the_host_only_bounds_are_absorbed() -> None:
    engine = Engine(mla=MLAPolicy(method=MATERIALISED))
    batch = engine.extend(0, 3).view(host_lens=UpperBound(40, 8))
    plan = engine.backend.compiler.prepare(engine.extend(0, 3))
    plan.host_seq_lens = plan.host_extend_lens = None
    engine.backend.mla.prepare(plan)
    assert plan.mla_method is ABSORBED
    assert batch.exact is None


@pytest.mark.parametrize("method", [ABSORBED, MATERIALISED])
def test_one_opaque_op_under_torch_compile(method: MLAMethod) -> None:
    """Compiled code sees the output's size from the query's, and no v."""
    engine = Engine(mla=MLAPolicy(method=method))
    layer = anyattn.AttentionLayer(SPEC, 0, mla_expand=engine.projections)
    batch, q = engine.extend(0, 3), torch.randn(3, 2, 32 if method.expands else 80)
    k = torch.randn(3, 1, 80)

    def model(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = layer(q * 2, k, None, batch)
        assert isinstance(out, torch.Tensor)
        return out + 1

    with anyattn.forward_context(engine.backend, engine.backend.init_forward_metadata(batch)):
        plain = model(q, k)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k)
    assert plain.shape == (3, 2, 16 if method.expands else 64)
    torch.testing.assert_close(compiled, plain)


def test_prefill_on_one_backend_and_decode_on_another() -> None:
    """A hybrid's plan is its child's, so the method is read the same way."""
    engine = Engine()
    other = anyattn.create_backend(engine.decision, engine.pool, engine.table, mla=MLAPolicy(method=ABSORBED))
    assert isinstance(engine.backend, AttentionBackend)
    assert isinstance(other, AttentionBackend)
    hybrid = HybridBackend(engine.backend, other)
    assert hybrid.init_forward_metadata(engine.extend(0, 12)).mla_method is MATERIALISED
    assert hybrid.init_forward_metadata(anyattn.ForwardBatch.decode([0], [9], [12])).mla_method is ABSORBED
