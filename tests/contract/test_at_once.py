"""Calls that an adapter stores and computes in one go: which are offered to it, and what comes of them."""

from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.reference.torch_native import TorchNative
from anyattn.core.batch import ForwardMode
from anyattn.core.capabilities import CapabilityRow, Feature, FormSpec, HeadDims, PageSizes, Phase
from anyattn.core.contract import BackendConfig
from anyattn.core.groups import GroupSet, PlanGroup
from anyattn.core.kv import MHAPool
from anyattn.core.plan import TableForm, TableKind

SPEC = anyattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)


class AtOnce(TorchNative):
    """Takes what it is told to take; notes what it is offered."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(config)
        self.takes, self.offered, self.stored = False, list[tuple[Any, ...]](), 0

    def at_once(self, layer: anyattn.AttentionLayer, mode: ForwardMode, group: PlanGroup) -> Any:
        """In decode alone."""

        def call(q: Any, k: Any, v: Any, out: Any, loc: Any, plan: Any) -> torch.Tensor | None:
            self.offered.append((layer.layer_id, loc.tolist(), out))
            return torch.full((plan.key.num_tokens, 4, 8), 3.0) if self.takes else None

        return call if mode is ForwardMode.DECODE else None

    def write_kv(self, *given: Any) -> None:
        """Counted."""
        self.stored += 1
        super().write_kv(*given)


def backend() -> AtOnce:
    row = CapabilityRow(
        phases=tuple(Phase),
        architectures=("cpu:avx2",),
        head_dims=HeadDims(maximum=1024),
        dtypes=("float32",),
        kv_dtypes=("float32",),
        pages=PageSizes(multiple_of=1),
        form=FormSpec("token_csr", 1, index_dtype="int64"),
        features=tuple(Feature),
    )
    config = BackendConfig(
        name="torch_native",
        groups=GroupSet.from_specs([SPEC]),
        pool=MHAPool([SPEC], num_slots=64, page_size=4, kv_dtype=torch.float32, dtype=torch.float32),
        table=anyattn.kv.RequestTable(max_requests=4, max_context=64),
        limits=anyattn.Limits(max_requests=4, max_tokens=64, max_context=64),
        form=TableForm(TableKind.TOKEN_CSR, index_dtype=torch.int64),
        row=row,
        dtype=torch.float32,
    )
    return AtOnce(config)


Q, K, V = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(3, 2, 8)


def run(made: AtOnce, *given: Any, padding: int = 0, **options: Any) -> Any:
    batch = anyattn.ForwardBatch.decode([0, 1, 2], [1, 1, 1], [4, 8, 12], num_padding_requests=padding)
    for b, slot in enumerate((4, 8, 12)):
        made.table.req_to_token[b, 0] = slot
    layer = anyattn.AttentionLayer(SPEC, layer_id=0)
    with anyattn.forward_context(made, made.init_forward_metadata(batch)):
        return layer(*(given or (Q, K, V)), batch, **options)


def test_what_it_takes_is_its_own() -> None:
    made = backend()
    made.takes = True
    assert torch.equal(run(made), torch.full((3, 4, 8), 3.0))
    assert made.offered == [(0, [4, 8, 12], None)]
    assert made.stored == 0, "it has stored them"
    assert run(made, padding=1)[:, 0, 0].tolist() == [3.0, 3.0, 0.0], "padded rows are zero"


def test_what_it_does_not_take_is_computed_as_ever() -> None:
    made, out = backend(), torch.empty(3, 4, 8)
    run(made, out=out)
    assert made.offered == [(0, [4, 8, 12], out)]
    assert made.stored == 1
    torch.testing.assert_close(out, V.repeat_interleave(2, 1))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ((Q, K, V), {"return_lse": True}),
        ((Q, K, V), {"return_lse": True, "lse_out": torch.empty(3, 4)}),
        ((Q, K, V), {"save_kv_cache": False}),
        ((Q, None, None), {}),
    ],
    ids=["lse", "lse_out", "not saved", "read back"],
)
def test_it_is_not_offered_what_is_not_plain(given: tuple[Any, ...], options: dict[str, Any]) -> None:
    made = backend()
    made.takes = True
    run(made, *given, **options)
    assert not made.offered


def test_other_modes_have_none() -> None:
    made = backend()
    batch = anyattn.ForwardBatch.extend([0], [0], [3], [4, 5, 6])
    made.table.req_to_token[0, :3] = torch.tensor([4, 5, 6])
    with anyattn.forward_context(made, made.init_forward_metadata(batch)):
        anyattn.AttentionLayer(SPEC, layer_id=0)(Q, K, V, batch)
    assert not made.offered
