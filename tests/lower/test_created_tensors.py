"""What a forward makes of nothing is on the device of the others, not on the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.cost import ClusterPrices
from autopar.lower.program.layer_program import layer_program
from autopar.planning.call_traces import trace_model
from autopar.search import SearchRequest, search


class Noisy(nn.Module):
    """Paths of whole rows are dropped, as Swin does it, and noise is added."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand((x.shape[0], 1), dtype=x.dtype, device=x.device).add(0.9).floor()
        noise = torch.randn(x.shape) + torch.randint(0, 2, x.shape)  # on the host, where the model was written
        return (self.linear(x) * keep + noise.to(x.device)).sum()


def test_draws_are_made_on_the_device() -> None:
    program = trace_model(Noisy(), {"x": torch.ones(4, 8)}).program
    plan = search(program, 1, ClusterPrices(Cluster.of("cpu", devices_per_node=1)), SearchRequest())
    lowered = layer_program(program, program.layers[0], plan.strategies[0], device="meta")
    draws = [
        node for node in lowered.module.graph.nodes if node.op == "call_function" and node.target.__name__ == "draw"
    ]
    assert {str(node.args[0]) for node in draws} >= {"aten.rand.default", "aten.randn.default"}
    assert len(draws) == 3
    assert all(node.kwargs["device"] == torch.device("meta") for node in draws)
