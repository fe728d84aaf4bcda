"""Programs do not depend on the order in which a model goes through a set of names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.trace import trace
from tests.trace.interpreter import interpret


class TablesByKind(nn.Module):
    """Makes a table and a mask for each kind of layer first, as models with several kinds of attention do."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = kinds
        rates = {"near": torch.tensor([0.5, 0.25, 0.125]), "far": torch.tensor([0.1, 0.01, 0.001])}
        for kind in kinds:
            self.register_buffer(f"rate_{kind}", rates[kind])
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, positions: Tensor, **kwargs: Tensor) -> Tensor:
        assert not kwargs
        fixed: dict[str, Tensor] = {}
        given: dict[str, Tensor] = {}
        masks: dict[str, Tensor] = {}
        for kind in self.kinds:
            rate: Tensor = getattr(self, f"rate_{kind}")
            fixed[kind] = (torch.arange(4.0)[:, None] * rate).cos()
            given[kind] = (positions[..., None] * rate).sin()
            masks[kind] = torch.where(positions > len(kind), 0.0, 1.0)[..., None]
        for layer, kind in zip(self.layers, ("far", "near", "far"), strict=True):
            x = layer(x + fixed[kind] + given[kind]) * masks[kind]
        return x.square().sum()


def test_a_set_of_names_may_be_in_any_order() -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(2, 4, 3), torch.arange(4.0).expand(2, 4))
    one, other = TablesByKind(("near", "far")), TablesByKind(("far", "near"))
    other.load_state_dict(one.state_dict())
    first, second = trace(one, inputs, {}), trace(other, inputs, {})
    assert first.program.fingerprint == second.program.fingerprint
    assert [*first.constants] == [*second.constants]
    assert all(torch.equal(x, second.constants[name]) for name, x in first.constants.items())
    for traced, model in ((first, one), (second, other)):
        (loss,), _ = interpret(traced, model, [*inputs])
        torch.testing.assert_close(loss, model(*inputs))
