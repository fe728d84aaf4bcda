"""The state that all graphs on one mesh share: communicator, prices, and the plans made so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from autopar.backend.options import Options
from autopar.backend.sharding import Replaced, check_replaced
from autopar.cost import ClusterPrices
from autopar.errors import AutoparError, BackendError
from autopar.lower.communication.consensus import agree, is_own_error
from autopar.lower.communication.process_groups import ProcessGroupCommunicator
from autopar.lower.communication.torch_groups import open_group
from autopar.lower.compat import make_mesh
from autopar.plan import Plan
from autopar.planning.mesh_cluster import mesh_prices
from autopar.planning.mesh_ranks import mesh_ranks
from autopar.search.layer.layout_choices import mesh_shapes

__all__ = ["Session", "made_plans", "session_of"]

T = TypeVar("T")


class Session:
    """One mesh of one process.

    Attributes:
        communicator: of this rank.
        group: through which ranks agree on plans: no other than that through which they compute, so that a rank that
            plans never meets one that computes.
        plans: those made so far, by program and options; ranks have the same.
        num_searches: how many of them were searched for.
        replaced: whole parameters that a call sharded, until the next call has made sure that they are gone.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        """Every rank of `mesh` makes its session at the same time."""
        ranks = mesh_ranks(mesh)
        self.mesh = mesh
        self.world = dist.group.WORLD
        self.communicator = ProcessGroupCommunicator(ranks, mesh.device_type)
        self.group = open_group(ranks)
        self.plans: dict[tuple[object, ...], Plan] = {}
        self.num_searches = 0
        self.replaced: Replaced = []
        self._prices: dict[int, ClusterPrices] = {}
        self._fine_mesh: DeviceMesh | None = None
        self._checked = WeakIdKeyDictionary()

    def prices(self, options: Options) -> ClusterPrices:
        """The prices of this mesh; the first time, devices may be measured."""
        key = id(options.profile)
        if key not in self._prices:
            self._prices[key] = mesh_prices(options.profile, self.communicator, self.mesh)
        return self._prices[key]

    def fine_mesh(self, options: Options) -> DeviceMesh:
        """The mesh that all parameters are sharded on, whatever meshes their plans have: a refinement of them all.

        Every rank asks for it at the same time.
        """
        if self._fine_mesh is None:
            world = self.communicator.world_size
            sizes = mesh_shapes(world, self.prices(options).devices_per_node, max_axes=world)[-1]
            is_it = tuple(self.mesh.shape) == sizes
            self._fine_mesh = self.mesh if is_it else make_mesh(sizes, mesh_ranks(self.mesh), self.mesh.device_type)
        return self._fine_mesh

    def check_replaced(self) -> None:
        """Raise BackendError, on every rank, if some rank still has a whole parameter that was sharded."""
        if self.replaced:
            agree(self.group, lambda: check_replaced(self.replaced))
            self.replaced.clear()

    def unchecked(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those that ranks have not compared yet; from now on they have."""
        results = [tensor for tensor in tensors if tensor not in self._checked]
        for tensor in results:
            self._checked[tensor] = True
        return results

    def together(self, graph: str, action: Callable[[], T]) -> T:
        """Run what all ranks must do at the same time to plan `graph`.

        Raises:
            BackendError: the others did not come within the process group's timeout.
        """
        try:
            return action()
        except AutoparError:
            raise
        except RuntimeError as error:
            if is_own_error(error):
                raise
            raise BackendError(
                f"rank {self.communicator.rank} plans a graph ({graph}), but not all ranks do ({error}). Dynamo must "
                "compile the same graphs in the same order on every rank: pass the same batch everywhere, and let no "
                "Python value that differs by rank (a rank number, a rank's own flag) decide what the model runs"
            ) from error


_sessions: dict[DeviceMesh, Session] = {}


def session_of(mesh: DeviceMesh) -> Session:
    """The session of this mesh, created on first use."""
    result = _sessions.get(mesh)
    if result is None or result.world is not dist.group.WORLD:  # the process group was started anew
        result = _sessions[mesh] = Session(mesh)
    return result


def made_plans(mesh: DeviceMesh) -> tuple[Plan, ...]:
    """The plans that ``torch.compile(..., backend="autopar")`` made on `mesh` so far, in order.

    Example:
        >>> print(*made_plans(mesh))       # doctest: +SKIP
    """
    return tuple(session_of(mesh).plans.values())
