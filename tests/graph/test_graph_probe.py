"""Detectors: host syncs, allocation, tensors that were bound anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from recorder_world import Served
from torch.nn.attention.flex_attention import flex_attention

from anyattn.testing.graph_probe import addresses, counting_allocations, rebound, watching_host_syncs

LENGTHS = (5, 24, 1)
X = torch.arange(6.0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_syncs_are_reported_once_each_with_their_lines() -> None:
    with watching_host_syncs("cpu") as found:
        assert bool(X[1])
        assert X[X > 2].shape == (3,)
        assert X.tolist()[0] == 0.0
        assert (X + 1).sum().shape == ()
        (X + 1)[:2] = 5.0
        (X + 1)[0] = 5.0
    operations = ["__bool__", "aten.index.Tensor", "tolist", "aten.copy_.default"]
    assert [sync.operation for sync in found] == operations
    assert all("test_graph_probe.py" in sync.where for sync in found)
    assert "assert bool(X[1])" in str(found[0])
    assert bool(X[1]), "nothing is left behind"


def test_a_clean_block_has_no_syncs() -> None:
    with watching_host_syncs("cpu") as found:
        torch.cumsum(X, 0, out=torch.empty(6))
    assert found == []


def test_the_device_half_of_planning_never_waits() -> None:
    """As `ANYATTN_CHECKS=host` runs it: full checks read values on purpose."""
    served = Served()
    served.backend.compiler.checks = "host"
    plan = served.backend.init_forward_metadata_out_graph(served.batch(LENGTHS))
    with watching_host_syncs("cpu") as found:
        served.backend.init_forward_metadata_in_graph(plan)
    assert found == []
    served.backend.compiler.checks = "full"
    with watching_host_syncs("cpu") as found:
        served.backend.init_forward_metadata_in_graph(plan)
    assert found, "the check that it can fail"


def test_allocations_are_counted_with_bytes_and_lines() -> None:
    out = torch.zeros(6)
    with counting_allocations("cpu") as found:
        torch.add(X, 1, out=out)
        out.view(2, 3).t()[0].zero_()
    assert (found.count, found.nbytes, found.places) == (0, 0, [])
    with counting_allocations("cpu") as found:
        (X + 1).mul_(2)
        X.clone()
        torch.empty(4, dtype=torch.int64)
    assert (found.count, found.nbytes) == (3, 24 + 24 + 32)
    assert [place.split(" at ")[0] for place in found.places] == [
        "aten.add.Tensor",
        "aten.clone.default",
        "aten.empty.memory_format",
    ]
    assert "test_graph_probe.py" in found.places[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_operators_written_in_python_are_seen_through() -> None:
    q = torch.randn(1, 1, 4, 4)
    with watching_host_syncs("cpu") as found, counting_allocations("cpu") as made:
        flex_attention(q, q, q)
    assert found == []
    assert any("aten.matmul" in place or "aten.bmm" in place for place in made.places)


@dataclass(eq=False)
class Holder:
    table: torch.Tensor
    parts: list[torch.Tensor] = field(default_factory=list)
    named: dict[object, torch.Tensor] = field(default_factory=dict)
    private: object = None


class Library:
    """As an object of a kernel library: no dataclass."""

    def __init__(self, owner: Holder) -> None:
        self.workspace, self.owner, self.size = torch.zeros(8), owner, 8


def test_addresses_of_nested_structures() -> None:
    holder = Holder(torch.zeros(3), [torch.zeros(2)], {"a": torch.zeros(1), (1, 2): torch.zeros(1)})
    holder.private = Library(holder)
    before = addresses(holder)
    assert set(before) == {"table", "parts[0]", "named[a]", "named[1]", "private.workspace"}
    assert before["table"].pointer == holder.table.data_ptr()
    assert addresses([holder.table]) == {"[0]": before["table"]}
    assert rebound(before, addresses(holder)) == []
    holder.table.fill_(1.0)
    assert rebound(before, addresses(holder)) == [], "new contents are no new address"


def test_rebinding_is_named() -> None:
    holder = Holder(torch.zeros(4), [torch.zeros(2)], {"a": torch.zeros(1)})
    before = addresses(holder)
    holder.table = holder.table[:2]
    holder.parts[0] = torch.ones(2)
    del holder.named["a"]
    holder.private = torch.zeros(1)
    lines = rebound(before, addresses(holder))
    assert [line.split(" ", 1)[0] for line in lines] == ["named[a]", "parts[0]", "private", "table"]
    assert "is gone" in lines[0]
    assert "other memory" in lines[1]
    assert "appeared" in lines[2]
    assert "(4,)" in lines[3]


def test_a_plan_keeps_its_addresses_only_in_buffers() -> None:
    served = Served()

    def planned() -> object:
        return served.backend.init_forward_metadata_out_graph(served.batch(LENGTHS))

    first = planned()
    assert rebound(addresses(first.tables), addresses(planned().tables))
    served.backend.init_cuda_graph_state(served.limits)
    before, after = (
        {path: at for path, at in addresses(planned().tables).items() if ".host." not in path}
        for _ in range(2)
    )
    assert before
    assert rebound(before, after) == []


@needs_cuda
def test_on_cuda() -> None:
    x = torch.arange(6.0, device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    with watching_host_syncs("cuda") as found:
        x.add_(1)
        x[0].item()
        pytest.fail("the block ends at its first sync")
    assert "x[0].item()" in found[0].where
    assert torch.cuda.get_sync_debug_mode() == mode
    with pytest.raises(RuntimeError, match="other"), watching_host_syncs("cuda"):
        raise RuntimeError("other")
    with counting_allocations("cuda") as made:
        x.add_(1)
    assert (made.count, made.nbytes) == (0, 0)
    with counting_allocations("cuda") as made:
        y = x + 1
    assert made.count == 1
    assert made.nbytes >= y.nbytes
