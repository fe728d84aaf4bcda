"""Moves parameters and gradients between their storage and whole copies, from which groups of any plan take slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.lower.communication.communicator import Communicator
from autopar.lower.compat import dtensor_like, local_part_of
from autopar.lower.parameters.layer_parameters import LayerParameters, Reduction
from autopar.lower.parameters.store import ParameterStore
from autopar.lower.run.stage_map import StageMap
from autopar.lower.run.step_values import influences
from autopar.lower.run.tied_gradients import exchanged_sum
from autopar.placement import BROADCAST
from autopar.program import Program

__all__ = ["Coupling"]


class Coupling:
    """Gathers all parameters once a step, and reduces their gradients, layer by layer in one order on all ranks.

    A copy is whole on every rank, and its gradient is a sum of terms: each rank brings what its own group computed.
    With pipeline stages these are the parameters and the ranks of a stage.

    Attributes:
        reached: names of the parameters, of all stages, from which the loss is computed.
    """

    def __init__(self, program: Program, store: ParameterStore, communicator: Communicator, stages: StageMap) -> None:
        """`program` is what such steps compute, of rows of any length, with parameters that `store` has on `stages`."""
        self._stages = stages
        whole = (BROADCAST,) * len(store.mesh)
        # What only other outputs are made of, which such a step doesn't return, has no gradient, as on one device.
        reached = (program.parameters.get(name, "") for name in influences(program, [program.loss]))
        self.reached = frozenset(store.first_name.get(name, name) for name in reached)
        self._store, self._communicator = store, communicator
        self._layers: list[LayerParameters] = []
        seen: set[str] = set()
        for layer in program.layers:
            read = (program.parameters[name] for name in layer.state if program.values[name].role == "parameter")
            first_names = dict.fromkeys(store.first_name.get(name, name) for name in read)
            names = [n for n in first_names if n not in seen and stages.group in store.stored[n].groups]
            if not names and stages.is_pipeline:
                continue
            seen.update(names)
            dtypes = [store.stored[name].dtype for name in names]
            self._layers.append(
                LayerParameters(
                    store, names, range(len(names)), [whole] * len(names), dtypes, store.mesh, communicator, layer.name
                )
            )
        communicator.prepare(sorted({step.axis for own in self._layers for steps in own.steps for step in steps}))

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that get gradients, by name."""
        pairs = (pair for layer in self._layers for pair in zip(layer.names, layer.current(), strict=True))
        return {name: p for name, p in pairs if p.requires_grad and name in self.reached}

    @property
    def trained_elsewhere(self) -> list[Tensor]:
        """The parameters of other pipeline stages that get gradients there; those of this rank have no elements."""
        return [*self._store.trained_elsewhere(sorted(self.reached), self._stages.group).values()]

    @torch.no_grad()
    def gather(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters by name, whole; while those of a layer are taken, the next one's are on their way."""
        handle = self._layers[0].start_gather(self._layers[0].current()) if self._layers else None
        for number, layer in enumerate(self._layers):
            own, following = handle, self._layers[number + 1 : number + 2]
            handle = following[0].start_gather(following[0].current()) if following else None
            yield from zip(layer.names, layer.finish_gather(layer.current(), own), strict=True)

    @torch.no_grad()
    def reduce(self, term_of: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
        """The gradients of trained parameters, as they are stored: sums over all ranks of `term_of` their names, which
        are whole, and zeros where it is None; while those of a layer are reduced, the next one's terms are made.
        """
        trained = self.trained
        gradients: dict[str, Tensor] = {}
        under_way: list[tuple[LayerParameters, Reduction]] = []

        def finish() -> None:
            layer, reduction = under_way.pop()
            pairs = zip(layer.names, reduction.wait(), strict=True)
            gradients.update({name: _as_stored(x, trained[name]) for name, x in pairs if x is not None})

        for layer in reversed(self._layers):
            terms = [self._term(term_of(name), name) if name in trained else None for name in layer.names]
            reduction = layer.start_reduce(terms)
            if under_way:
                finish()
            under_way.append((layer, reduction))
        if under_way:
            finish()
        for name in sorted(trained):
            groups = self._store.stored[name].groups
            if len(groups) > 1:
                own = local_part_of(gradients[name])
                gradients[name] = _as_stored(
                    exchanged_sum(self._communicator, self._stages, own, groups), trained[name]
                )
        return gradients

    def _term(self, term: Tensor | None, name: str) -> Tensor:
        if term is not None:
            return term
        stored = self._store.stored[name]
        return torch.zeros(stored.shape, dtype=stored.dtype, device=self._communicator.device)


def _as_stored(gradient: Tensor, parameter: nn.Parameter) -> Tensor:
    local = gradient.to(parameter.dtype).contiguous()
    return dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local
