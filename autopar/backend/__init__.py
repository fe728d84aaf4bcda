"""``torch.compile(model, backend="autopar", options={"mesh": mesh})``: the graphs that Dynamo finds, on all devices.

`entry` is what torch finds under the name ``"autopar"``; `dynamo_graph` reads what Dynamo hands over; `options` reads
what the user says; `session` is what all graphs on one mesh share; `planning` makes a plan of a graph for sizes at
hand; `running` runs it on the user's own parameters; `compiled_graph` is what Dynamo's code calls.

Parameters stay what they are and where they are: whole on every rank unless they are DTensors.  A plan is searched for
with that as a given (`autopar.search.SearchRequest.stored`): slices are taken of whole parameters in forward, whole
gradients come back, and memory counts whole parameters, gradients and optimizer states.
"""

from autopar.backend.session import made_plans

__all__ = ["made_plans"]
