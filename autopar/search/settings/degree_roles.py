"""Demanded degrees as roles of mesh axes: which options of ops a role allows, and whether a strategy plays it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from autopar.ops import family_of
from autopar.ops.halos import space_factor
from autopar.plan import LayerStrategy
from autopar.program import Layer, Op, Option, Program
from autopar.search.settings.constraints import LayerDemands
from autopar.search.settings.labels import DEGREE_LABELS, axis_labels, cuts_stack, option_of, weight_operands
from autopar.search.settings.space_splits import only_space
from autopar.step.layer.op_states import Allowed

__all__ = ["AxisRoles", "allowed_options", "meets_degrees", "role_choices", "stack_sizes"]

# Per mesh axis the degree that it must serve ("" for none that is demanded).
AxisRoles = tuple[str, ...]


def role_choices(mesh: tuple[int, ...], demands: LayerDemands) -> Iterator[AxisRoles]:
    """Every way to give the demanded degrees to axes."""
    degrees = dict(demands.degrees)
    for roles in itertools.product(("", *degrees), repeat=len(mesh)):
        product = dict.fromkeys(degrees, 1)
        for role, size in zip(roles, mesh, strict=True):
            if role:
                product[role] *= size
        if product == degrees and not any(role and size == 1 for role, size in zip(roles, mesh, strict=True)):
            yield roles


def allowed_options(
    program: Program,
    layer: Layer,
    mesh: tuple[int, ...],
    demands: LayerDemands,
    roles: AxisRoles,
    whole_results: Collection[str] = (),
) -> Allowed | None:
    """Which options the demands leave, None for all; `whole_results` are values that must stay whole on devices."""
    whole_state = {layer.state[position] for position in demands.whole}
    in_space = only_space(layer, demands.space)
    if not any(roles) and not demands.degrees and not whole_state and not whole_results:
        return in_space
    demanded = {name for name, _ in demands.degrees}

    def allowed(op: Op, axis: int, option: Option) -> bool:
        if mesh[axis] == 1:
            return True
        if in_space is not None and not in_space(op, axis, option):
            return False
        placements = zip(op.operands, option.operands, strict=True)
        if any(name in whole_state and placement.is_shard for name, placement in placements):
            return False
        if any(n in whole_results and p.kind != "R" for n, p in zip(op.results, option.results, strict=True)):
            return False
        fits = _fits_role(program, op, option, roles[axis], demanded)
        return fits and _follows(program, op, option, _role_dims(program, op, roles[axis], demands.space), mesh[axis])

    return allowed


def _fits_role(program: Program, op: Op, option: Option, role: str, demanded: set[str]) -> bool:
    weights = weight_operands(program, op)
    if not weights:
        return True
    cuts = any(option.operands[position].is_shard for position in weights)
    if "expert" in demanded and _can_cut_stacks(program, op):
        in_stack = any(cuts_stack(program, op, option, position) for position in weights)
        if in_stack or role == "expert":
            # Beside the batch, experts on one more axis may be the fastest; that axis would count as `expert`, too.
            return in_stack and role == "expert"
    if role == "tensor":
        return _cuts_matrices(program, op, option) or not any(_cuts_matrices(program, op, o) for o in op.options)
    return not cuts if role or "tensor" in demanded else True


def _cuts_matrices(program: Program, op: Op, option: Option) -> bool:
    weights = weight_operands(program, op)
    in_stack = any(cuts_stack(program, op, option, position) for position in weights)
    return not in_stack and any(option.operands[position].is_shard for position in weights)


def _can_cut_stacks(program: Program, op: Op) -> bool:
    return any(cuts_stack(program, op, o, position) for o in op.options for position in weight_operands(program, op))


def stack_sizes(program: Program, layer: Layer) -> set[int]:
    """Of ops with stacks of matrices of which each device may have some: how many there are."""
    return {
        option.extent
        for op in layer.ops
        for option in op.options
        if any(cuts_stack(program, op, option, position) for position in weight_operands(program, op))
    }


def _follows(program: Program, op: Op, option: Option, dims: tuple[int, ...], size: int) -> bool:
    """Whether the option cuts one of `dims`, those of an axis's role, if one of the op's options does."""
    computed = any(program.values[name].role in ("op", "input") for name in op.operands)
    if not dims or not computed or not program.values[op.results[0]].requires_grad:
        return True
    weights = weight_operands(program, op)

    def cuts(each: Option) -> bool:
        whole = not any(each.operands[position].is_shard for position in weights)
        result = each.results[0]
        return whole and result.is_shard and result.dim in dims and each.extent % size == 0

    return cuts(option) or not any(map(cuts, op.options))


def _role_dims(program: Program, op: Op, role: str, space: int) -> tuple[int, ...]:
    """The dims of the op's result that an axis of this role may cut; none says nothing.

    `space` is the dim of images that is split for `context`, in ops that have a rule for it.
    """
    num_dims = len(program.type_of(op.results[0]).shape)
    if role == "data":
        return (0,)
    if role in ("sequence", "context") and family_of(op.target).is_attention:
        heads_too = role == "sequence"  # Ulysses; queries: context
        return tuple(range(1 if heads_too else num_dims - 2, num_dims - 1))
    if role == "context" and space and option_of(op, space_factor(space)) is not None:
        return (space,)
    return (1,) if role in ("sequence", "context") and num_dims == 3 else ()


def meets_degrees(
    program: Program, layer: Layer, strategy: LayerStrategy, demands: LayerDemands, roles: AxisRoles
) -> bool:
    """Whether every axis does what its role says, and no other axis does what a degree is demanded of."""
    if not demands.degrees:
        return True
    labels = axis_labels(program, layer, strategy)
    names = {name for name, _ in demands.degrees}
    return all(
        label in DEGREE_LABELS[role] and not (role == "sequence" and label == "context" and "context" in names)
        if role
        else size == 1 or all(label not in DEGREE_LABELS[name] for name, _ in demands.degrees)
        for label, role, size in zip(labels, roles, strategy.mesh, strict=True)
    )
