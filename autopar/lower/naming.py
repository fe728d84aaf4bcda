"""Names and comments of layer programs, and their printed form."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from autopar.placement import Layout, Step, format_layout
from autopar.program import TensorType

__all__ = ["describe_move", "format_code", "layout_suffix", "node_name", "type_comment"]

_LOCAL = ("none", "slice", "pad", "mask")


def node_name(value: str) -> str:
    """A Python identifier for the value called `value`."""
    name = re.sub(r"\W", "_", value)
    return f"_{name}" if not name or name[0].isdigit() else name


def layout_suffix(layout: Layout) -> str:
    """``S0_R`` for ``S(0),R``."""
    return "_".join(f"S{p.dim}" if p.is_shard else p.kind for p in layout) or "whole"


def type_comment(tensor: TensorType, layout: Layout) -> str:
    """Local shape, dtype, layout and bytes: ``[4, 16] float32 S(0),R 256 B``."""
    return f"{list(tensor.shape)} {tensor.dtype} {format_layout(layout)} {_bytes(tensor.num_bytes)}"


def describe_move(steps: Sequence[Step], whole: TensorType) -> str:
    """What the steps of a move run: ``all_gather on 4 ranks, 1.0 MB (backward: reduce_scatter)``."""
    return ", ".join(_describe_step(step, whole) for step in steps)


def _describe_step(step: Step, whole: TensorType) -> str:
    size = "" if step.forward in _LOCAL else f", {_bytes(whole.num_bytes * step.fraction)}"
    return f"{step.forward} on {step.axis.size} ranks{size} (backward: {step.backward})"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def format_code(module: fx.GraphModule) -> str:
    """The code of a layer program, each line with what it holds on one device."""
    comments = {node.name: str(node.meta["comment"]) for node in module.graph.nodes if "comment" in node.meta}
    lines: list[str] = []
    for line in module.code.strip().splitlines():
        text = re.sub(r";(\s+\w+ =)+ None.*$", "", line.split("  # ")[0]).rstrip()
        text = re.sub(r"\bautopar_lower_[a-z_]+?_(?=(redistribute|microbatch_slice|run_kernel|draw)\()", "", text)
        text = re.sub(r"\bautopar_lower_(kernels|batch_norm|cross_entropy|embedding)_(?=\w+\()", "autopar.", text)
        text = text.replace("torch.ops.", "")
        name = re.match(r"\s*(\w+) = ", text)
        comment = comments.get(name[1]) if name else None
        lines.append(f"{text}  # {comment}" if comment else text)
    return "\n".join(lines)
