"""Which dim of images or videos a search may split in space, if any.

Convolutions that are split in space exchange halos, which a split of the batch does not need.  So a search considers
them only if the batch does not divide over the devices, if a constraint demands `context`, or if nothing else fits; and
only in one dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.errors import ConstraintError
from autopar.ops import family_of
from autopar.ops.halos import SPACE_DIMS, space_dim
from autopar.program import Layer, Op, Option, Program
from autopar.search.settings.constraints import LayerDemands, demands_on, parse_constraints
from autopar.step.layer.op_states import Allowed

__all__ = ["can_add_space", "check_images", "only_space", "space_on_mesh", "with_space"]


def with_space(
    program: Program, demands: tuple[LayerDemands, ...], num_devices: int, *, even_if_divides: bool = False
) -> tuple[LayerDemands, ...]:
    """`demands` with the dim that may be split in space; `even_if_divides`: whether or not the batch does."""
    left = num_devices if even_if_divides else num_devices // math.gcd(num_devices, program.batch_size)
    dim = _best_dim(program, _demanded(demands) or _smallest_prime(left))
    return tuple(replace(each, space=dim) for each in demands) if dim else demands


def can_add_space(program: Program, num_devices: int, constraints: Sequence[str]) -> bool:
    """Whether a search that left out splits in space, as the batch divides over the devices, could consider them."""
    demanded = _demanded(demands_on(program, parse_constraints(constraints, num_devices)))
    is_left_out = not demanded and program.batch_size % num_devices == 0
    return is_left_out and _best_dim(program, _smallest_prime(num_devices)) > 0


def _best_dim(program: Program, degree: int) -> int:
    """The dim in which ops with the most elements split into `degree` slices; 0 if there is none, or for one slice."""
    if degree == 1:
        return 0
    elements: dict[int, int] = dict.fromkeys(SPACE_DIMS, 0)
    needs_halos = False
    for layer in program.kinds:
        for op, option in _options_in_space(layer):
            if option.extent % degree == 0:
                elements[space_dim(option.factor)] += program.type_of(op.results[0]).num_elements
                needs_halos |= bool(option.kernel)
    # Where patches alone are split, tokens are as well, without regard to images.
    return max(elements, key=lambda dim: elements[dim]) if needs_halos else 0


def space_on_mesh(program: Program, layer: Layer, mesh: tuple[int, ...], demands: LayerDemands) -> int:
    """The dim that may be split in space on this mesh; 0 for none.

    Where all devices can share an image in slices of one axis, and the batch splits on none, several axes add choices
    (space with channels) that were not chosen and made planning longer: of 50 convolutions with one image on 8
    devices, 24 seconds of CPU instead of 14.
    """
    num_devices, has_axes = math.prod(mesh), sum(size > 1 for size in mesh) > 1
    if not has_axes or any(degree > 1 for _, degree in demands.degrees) or not demands.space:
        return demands.space
    is_enough = all(
        option.extent % num_devices == 0
        for _, option in _options_in_space(layer)
        if space_dim(option.factor) == demands.space
    )
    return 0 if is_enough and math.gcd(program.batch_size, num_devices) == 1 else demands.space


def _smallest_prime(number: int) -> int:
    return next((prime for prime in range(2, math.isqrt(number) + 1) if number % prime == 0), number)


def _options_in_space(layer: Layer) -> Iterator[tuple[Op, Option]]:
    return ((op, option) for op in layer.ops for option in op.options if space_dim(option.factor))


def only_space(layer: Layer, space: int) -> Allowed | None:
    """What allows only options that split no dim in space but this one; None if the layer has no others."""
    if all(space_dim(option.factor) == space for _, option in _options_in_space(layer)):
        return None
    return lambda op, axis, option: space_dim(option.factor) in (0, space)


def check_images(program: Program, demands: Sequence[LayerDemands]) -> None:
    """Raise `ConstraintError` if a context degree divides no dim of the images or videos that are convolved.

    Not in models with attention, whose tokens may divide.
    """
    degree = _demanded(demands)
    splits = [
        (option.extent, program.type_of(op.operands[0]).shape[2:])
        for layer in program.kinds
        for op, option in _options_in_space(layer)
        if option.kernel
    ]
    if degree <= 1 or not splits or any(extent % degree == 0 for extent, _ in splits):
        return
    if any(family_of(op.target).is_attention for layer in program.kinds for op in layer.ops):
        return
    sizes = " x ".join(map(str, max((sizes for _, sizes in splits), key=math.prod)))
    raise ConstraintError(
        f"constraint 'context={degree}': images of {sizes} do not divide over {degree} devices in any dim that a "
        "convolution splits. Resize or pad them to a multiple, or choose another degree"
    )


def _demanded(demands: Sequence[LayerDemands]) -> int:
    """The largest context degree that is demanded; 0 for none."""
    return max((dict(each.degrees).get("context", 0) for each in demands), default=0)
