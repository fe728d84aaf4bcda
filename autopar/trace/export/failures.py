"""The error for what goes wrong in an export, with the user's own line and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

from torch import nn

from autopar.errors import AutoparError, ExampleInputsError, TraceError
from autopar.objects.caught_errors import also_caught_as
from autopar.trace.calls.signature import CallForm
from autopar.trace.compat import torch_internals
from autopar.trace.compat.source_lines import user_frame
from autopar.trace.python_values.read_inputs import ValueReadError

__all__ = ["communication_refused", "explain_failure"]

_COLLECTIVES = "torch.distributed.nn.functional."  # those with gradients, which torch.export refuses by name


def communication_refused(where: str, call: str) -> TraceError:
    """The error of a model that communicates by `call`."""
    return TraceError(
        f"{where}: the model calls torch.distributed ({call}) in its forward, as models for "
        "DistributedDataParallel do. A parallelized model sees the whole batch, as one device does: leave "
        "communication out, as where there is one process (sync_codebook=False and the like)"
    )


def explain_failure(error: BaseException, form: CallForm, model: nn.Module) -> AutoparError:
    """The error for what went wrong in export, with the user's own line."""
    chain = _chain(error)
    own = next((e for e in chain if isinstance(e, AutoparError)), None)
    if own is not None:
        return own
    where = next((w for e in reversed(chain) if (w := user_frame(traceback.extract_tb(e.__traceback__)))), "")
    cause = chain[-1]
    text = str(cause).strip().split("\n")[0]
    if _needs_a_number(chain) or "data-dependent" in str(error).lower():
        config: Any = getattr(model, "config", None)
        if getattr(config, "_experts_implementation", None) == "eager" and _are_experts(chain):
            return TraceError(
                f"{where or 'the model'}: eager experts look up in Python which of them got tokens, so the model is "
                f"not one graph. {_other_experts(model)}"
            )
        needs = ValueReadError(
            f"{where or 'the model'}: Python needs the value of a tensor here ({text}), so the model is not one graph. "
            "Compute both sides and choose with torch.where, or decide outside of the model and pass the decision as a "
            "plain Python argument; shapes must not depend on values"
        )
        needs.where = where
        return needs
    if "at least two devices" in text and "meta" in text:
        return TraceError(
            f"{where or 'the model'}: a tensor on the meta device is no parameter and no buffer ({text}): register "
            "it with register_buffer, or make it in forward"
        )
    if text.startswith(_COLLECTIVES):
        return communication_refused(where or "the model", text.split(" ")[0])
    if where and not type(cause).__module__.startswith("torch."):
        return also_caught_as(ExampleInputsError, cause)(
            f"{where}: the model fails on the example inputs: {type(cause).__name__}: {text}. It got "
            f"{form.inputs_text} and is called as {form.signature_text}"
        )
    return TraceError(f"{where or 'the model'}: torch.export can't capture the model: {type(cause).__name__}: {text}")


def _other_experts(model: Any) -> str:
    """What to do about experts that ask in Python."""
    if getattr(model, "_can_set_experts_implementation", lambda: True)():
        return "Call model.set_experts_implementation('grouped_mm'), or 'batched_mm' for few tokens"
    return (
        f"{type(model).__name__} has no other form of them (it takes no set_experts_implementation): replace the "
        "module of its experts by one that loops over all of them, or sorts rows for torch._grouped_mm"
    )


def _are_experts(chain: Sequence[BaseException]) -> bool:
    """Whether these were raised in experts: every model of transformers has a form of experts."""
    frames = (frame for error in chain for frame, _ in traceback.walk_tb(error.__traceback__))
    return any("Experts" in type(frame.f_locals.get("self")).__name__ for frame in frames)


def _needs_a_number(chain: Sequence[BaseException]) -> bool:
    """Whether Python was given a number or tensor that the trace doesn't know, where it takes none: in sets, as keys of
    dicts, sizes and arrays.
    """
    if any(isinstance(e, torch_internals.DATA_DEPENDENT) for e in chain):
        return True
    # Kinds that only a trace has, so the model does not fail by itself.
    unknown = (*(kind.__name__ for kind in torch_internals.SYMBOLIC), "got FakeTensor", ".numpy() is not supported")
    return isinstance(chain[-1], (TypeError, RuntimeError)) and any(name in str(chain[-1]) for name in unknown)


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return chain
