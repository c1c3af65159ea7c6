"""`torch.compile(fullgraph=True)` of a two-layer model through the one opaque op."""

import torch
from test_contract import SPEC, backend  # type: ignore[import-not-found]
from torch import nn

import anyattn


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = SPEC.num_q_heads * SPEC.head_dim
        kv = SPEC.num_kv_heads * SPEC.head_dim
        self.qkv = nn.ModuleList(nn.Linear(width, width + 2 * kv) for _ in range(2))
        self.attention = nn.ModuleList(anyattn.AttentionLayer(SPEC, i) for i in range(2))
        self.split = (width, kv, kv)

    def forward(self, x: torch.Tensor, batch: anyattn.ForwardBatch) -> torch.Tensor:
        for project, attention in zip(self.qkv, self.attention, strict=True):
            q, k, v = project(x).split(self.split, dim=1)
            x = x + attention(q, k, v, batch)
        return x


def test_a_model_compiles_as_one_graph_and_follows_its_batches() -> None:
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    made = backend([SPEC, SPEC])
    model = TwoLayers()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=count)
    with torch.no_grad():
        for row in range(3):
            slots = torch.arange(4 + 12 * row, 4 + 12 * row + 9)
            made.table.req_to_token[row, :9] = slots.int()
            batch = anyattn.ForwardBatch.extend([row], [0], [9], slots)
            x = torch.randn(9, SPEC.num_q_heads * SPEC.head_dim)
            plan = made.init_forward_metadata(batch)
            with anyattn.forward_context(made, plan):
                want = model(x, batch)
                torch.testing.assert_close(compiled(x, batch), want)
    assert len(graphs) == 1
    calls = [n for n in graphs[0].graph.nodes if "anyattn" in str(n.target)]
    assert len(calls) == 2


def test_the_op_passes_torchs_own_checks() -> None:
    made, layer = backend(), anyattn.AttentionLayer(SPEC, 0)
    slots = torch.arange(4, 9)
    made.table.req_to_token[0, :5] = slots.int()
    batch = anyattn.ForwardBatch.extend([0], [0], [5], slots)
    plan = made.init_forward_metadata(batch)
    args = (
        torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8),
        torch.empty(5, 4, 8), torch.empty(5, 4), layer.key, True,
    )  # fmt: skip
    with anyattn.forward_context(made, plan):
        torch.library.opcheck(
            torch.ops.anyattn.attention.default, args, test_utils=("test_schema", "test_faketensor")
        )
