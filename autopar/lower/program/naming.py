"""Names and comments of layer programs, and pieces of their printed form."""

from __future__ import annotations

import re

from autopar.ops import own_families
from autopar.placement import Layout, Placement, format_layout
from autopar.program import TensorType

__all__ = [
    "format_bytes",
    "format_statement",
    "layout_suffix",
    "node_name",
    "type_comment",
]

_WHOLE_OPS = "|".join(sorted(family.function for family in own_families() if family.function))


def node_name(value: str) -> str:
    """A Python identifier for the value called `value`."""
    name = re.sub(r"\W", "_", value)
    return f"_{name}" if not name or name[0].isdigit() else name


def layout_suffix(layout: Layout) -> str:
    """``S0_R`` for ``S(0),R``."""
    return "_".join(_word(p) for p in layout) or "whole"


def _word(placement: Placement) -> str:
    if not placement.is_shard:
        return placement.kind
    return f"S{placement.dim}" + (f"x{placement.parts}" if placement.parts > 1 else "")


def type_comment(tensor: TensorType, layout: Layout) -> str:
    """Local shape, dtype, layout and bytes: ``[4, 16] float32 S(0),R 256 B``."""
    return f"{list(tensor.shape)} {tensor.dtype} {format_layout(layout)} {format_bytes(tensor.num_bytes)}"


def format_bytes(count: float) -> str:
    """``1.5 KB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


_OWN = "redistribute|microbatch_(slice|term)|(run|begin|continue|finish)_kernel|draw"


def format_statement(line: str) -> str:
    """A line of a layer program's code, without what only fx needs to say."""
    text = re.sub(r";(\s+\w+ =)+ None.*$", "", line.split("  # ")[0]).rstrip()
    text = re.sub(rf"\bautopar_lower_[a-z_]+?_(?=({_OWN})\()", "", text)
    text = re.sub(rf"\bautopar_lower_kernels_\w*?({_WHOLE_OPS})\(", r"autopar.\1(", text)
    return text.replace("torch.ops.", "")
