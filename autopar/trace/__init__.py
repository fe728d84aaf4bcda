"""trace: a torch module and example inputs become a `Program`.

`export` runs the module on fake tensors and makes plain data of the graph; the passes listed in
`autopar.trace.tracing.PASSES` normalize it, `annotations` attaches rules, `layers` cuts it.
"""

from autopar.trace.calls.call_tensors import call_opener
from autopar.trace.calls.input_gradients import as_called
from autopar.trace.calls.loss_output import without_loss
from autopar.trace.calls.parts import as_model
from autopar.trace.calls.shared_memory import check_memory
from autopar.trace.calls.signature import as_batch, bind, can_be_read, computed_texts, default_example_inputs
from autopar.trace.compat.flex_attention import dense_flex_attention
from autopar.trace.compat.source_lines import frame_of_text
from autopar.trace.compat.torch_internals import argument_source, is_wrapped_number
from autopar.trace.experts.grouped_products import accurate_products
from autopar.trace.export.captured_graphs import function_gradients, hidden_backwards, run_captured
from autopar.trace.layers.cutting import LayerNeeds
from autopar.trace.loss_function import LossFunction, put_loss_inside, require_target, without_target
from autopar.trace.module_attributes.model_copies import copy_with, own_copy
from autopar.trace.padded.any_length import check_one_graph, reading_last_entry
from autopar.trace.padded.prefixes import LongerProgram, PaddingError, compare, ignored_labels
from autopar.trace.passes.plain_numbers import is_unlike
from autopar.trace.torch_functions.feature_order import FEATURE_ORDER
from autopar.trace.tracing import Traced, trace

__all__ = [
    "FEATURE_ORDER",
    "LayerNeeds",
    "LongerProgram",
    "LossFunction",
    "PaddingError",
    "Traced",
    "accurate_products",
    "argument_source",
    "as_batch",
    "as_called",
    "as_model",
    "bind",
    "call_opener",
    "can_be_read",
    "check_memory",
    "check_one_graph",
    "compare",
    "computed_texts",
    "copy_with",
    "default_example_inputs",
    "dense_flex_attention",
    "frame_of_text",
    "function_gradients",
    "hidden_backwards",
    "ignored_labels",
    "is_unlike",
    "is_wrapped_number",
    "own_copy",
    "put_loss_inside",
    "reading_last_entry",
    "require_target",
    "run_captured",
    "trace",
    "without_loss",
    "without_target",
]
