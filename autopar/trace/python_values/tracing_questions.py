"""Models that ask whether they are being traced compute what they do when they are called.

A model may compute something else under torch.export: transformers' decoders make masks that they leave out otherwise,
some models skip what can't be compiled.  A plan has to be for what the model computes on one device.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from autopar.errors import TraceError
from autopar.trace.compat import torch_recording

__all__ = ["UndecidedMaskError", "answered_as_called"]

_NEVER_ASK = frozenset(("autopar", "mpmath", "networkx", "numpy", "scipy", "sympy", "torch"))


class UndecidedMaskError(TraceError):
    """Whether a model makes a mask when it is called depends on the values of its inputs."""


@contextmanager
def answered_as_called(report: Callable[[], None]) -> Generator[None]:
    """Inside, ``torch.compiler.is_compiling()`` and ``is_exporting()`` say False to all but torch's own code, also
    where modules have imported them by name.

    `report` is called when they do so under torch.export.
    """

    def asked(function: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            if not function():
                return False
            frame = inspect.currentframe()
            caller = None if frame is None else frame.f_back
            del frame  # it would hold itself, and with it what is traced
            if caller is not None and str(caller.f_globals.get("__name__", "")).startswith("torch."):
                return True
            report()
            return False

        return answer

    checks: Any = sys.modules.get("transformers.utils.import_utils")
    with ExitStack() as patches:
        answers = {function: asked(function) for function in (torch.compiler.is_compiling, torch.compiler.is_exporting)}
        for module, members in _asking_modules():
            for name, x in [(name, x) for name, x in members.items() if type(x) is FunctionType and x in answers]:
                patches.enter_context(patch.object(module, name, answers[x]))
        if hasattr(checks, "is_tracing"):  # as `torch_compilable_check` calls it: values are not checked
            patches.enter_context(patch.object(checks, "is_tracing", _is_tracing))
        patches.enter_context(_unused_masks())
        yield


def _asking_modules() -> Generator[tuple[Any, Mapping[str, Any]]]:
    """The modules that may hold one of these functions, with their members.

    To look through all of them is an eighth of what a small trace takes, and most are torch's own, which get the truth
    anyway, or of packages that know nothing of torch.
    """
    for path, module in list(sys.modules.items()):
        package = path.partition(".")[0]
        if path == "torch.compiler" or not (package in _NEVER_ASK or package in sys.stdlib_module_names):
            yield module, getattr(module, "__dict__", {})  # None is no module, but may be there


def _is_tracing(_: Any = None) -> bool:
    return True


@contextmanager
def _unused_masks() -> Generator[None]:
    """Inside, attention of transformers that is not causal gets no causal mask that it doesn't get when it is called.

    Where nothing is padded or packed, ``create_causal_mask`` makes no mask then, as attention is causal by itself.  In
    models of images and text it may not be: without ``token_type_ids`` all tokens see each other.
    """
    masking: Any = sys.modules.get("transformers.masking_utils")
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    create = getattr(masking, "create_causal_mask", None)
    kinds: Any = getattr(getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None), "_global_mapping", {})
    attend = kinds.get("sdpa")
    if create is None or attend is None:
        yield
        return
    unused: list[Tensor] = []
    undecided: list[Tensor] = []

    def create_noting(*args: Any, **kwargs: Any) -> Any:
        mask = create(*args, **kwargs)
        if isinstance(mask, Tensor) and not args and _can_be_left_out(kwargs):
            depends = kwargs.get("attention_mask") is not None or _is_of_inputs(kwargs.get("position_ids"))
            (undecided if depends else unused).append(mask)
        return mask

    def attend_without(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        # Some say False where they got a mask, and are causal without one.
        is_causal = kwargs.get("is_causal") or getattr(module, "is_causal", True)
        if not is_causal and any(attention_mask is mask for mask in undecided):
            raise UndecidedMaskError(
                f"{type(module).__name__} attends causally to batches in which attention_mask or position_ids hide "
                "something, and to all tokens in others: transformers decides that by their values. Leave "
                "attention_mask and position_ids out, or pass token_type_ids, with which the mask is always made"
            )
        is_unused = not is_causal and any(attention_mask is mask for mask in unused)
        return attend(module, query, key, value, None if is_unused else attention_mask, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(patch.dict(kinds, {"sdpa": attend_without}))
        for module, members in _asking_modules():
            if members.get("create_causal_mask") is create:
                patches.enter_context(patch.object(module, "create_causal_mask", create_noting))
        yield


def _can_be_left_out(arguments: Mapping[str, Any]) -> bool:
    """Whether a call of ``create_causal_mask`` with these makes no mask if nothing is padded or packed."""
    extra = ("or_mask_function", "and_mask_function", "block_sequence_ids", "past_key_values", "cache")
    is_causal = getattr(arguments.get("config"), "is_causal", True)
    is_plain = all(arguments.get(name) is None for name in extra)
    return is_causal and is_plain and arguments.get("allow_is_causal_skip", True)


def _is_of_inputs(x: Tensor | None) -> bool:
    """Whether a tensor of the trace under way depends on inputs of the model, rather than on shapes alone."""
    recorder = torch_recording.recorder()
    node = None if x is None or recorder is None else recorder.node_of(x)
    seen: set[fx.Node] = set()
    front = [] if node is None else [node]
    while front:
        node = front.pop()
        if node.op == "placeholder":
            return True
        front += [each for each in node.all_input_nodes if each not in seen]
        seen.update(node.all_input_nodes)
    return False
