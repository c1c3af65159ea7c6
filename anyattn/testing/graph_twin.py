"""Steps at a bucket's shape without a graph: what replays are compared with, bit for bit."""

from __future__ import annotations

import torch

from anyattn.core.batch import Exact, ForwardBatch
from anyattn.core.context import forward_context
from anyattn.core.plan import Plan
from anyattn.testing.graph_lab import GraphLab, GraphStep

__all__ = ["EagerTwin"]


class EagerTwin:
    """A second backend on the lab's pool and table that runs steps at a bucket's shape without a graph.

    Planned as a capture plans (bounds of the largest step), so that kernels take the same tiles and splits;
    padded by hand, apart from the code under test.
    """

    def __init__(self, lab: GraphLab) -> None:
        self._lab, self.backend = lab, lab.new_backend()
        self.backend.init_cuda_graph_state(lab.limits)
        self._plans: dict[tuple[int, str], Plan] = {}

    def run(self, step: GraphStep, size: int) -> tuple[dict[str, torch.Tensor], Plan]:
        """All outputs of the bucket, padded rows too, and the plan that they ran on."""
        lab, backend = self._lab, self.backend
        padded = self.padded(step, size)
        key = size, backend.route_of(padded)
        if key not in self._plans:
            self._plans[key] = backend.init_forward_metadata_out_graph(padded, in_capture=True)
        plan = backend.init_forward_metadata_out_graph(padded, captured=self._plans[key])
        backend.init_forward_metadata_in_graph(plan)
        with torch.no_grad(), forward_context(backend, plan):
            return lab.body(padded, **self.padded_inputs(step, size)), plan

    def padded(self, step: GraphStep, size: int) -> ForwardBatch:
        """The step with requests that stand for nobody behind it."""
        lab, missing, tokens = self._lab, size - len(step.rows), self._lab.setup.tokens
        serving = lab.backend.routed(lab.setup.mode, lab.backend.route_of(step.batch))
        fill = serving.get_cuda_graph_seq_len_fill_value(lab.setup.mode, tokens)
        batch = lab.make_batch(
            [*step.rows, *[lab.table.padding_row] * missing],
            [*step.prefix, *[fill - tokens] * missing],
            [*step.loc, *[0] * missing * tokens],
            step.trees,
            padding=missing,
        )
        if missing and fill != tokens:  # a decode of padding counts its own token, unless it is asked not to
            seq_lens = batch.seq_lens.clone()
            seq_lens[len(step.rows) :] = fill
            exact = None if batch.exact is None else Exact(seq_lens.cpu(), batch.exact.extend_lens)
            batch = batch.view(seq_lens=seq_lens, host_lens=batch.host_lens if exact is None else exact)
        return batch.view(captured_mode=lab.setup.mode)

    def padded_inputs(self, step: GraphStep, size: int) -> dict[str, torch.Tensor]:
        """Zeros behind the step's own."""
        rows = size * self._lab.setup.tokens
        found = {}
        for name, value in step.inputs.items():
            found[name] = value.new_zeros(rows, *value.shape[1:])
            found[name][: value.shape[0]] = value
        return found
