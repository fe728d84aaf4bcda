"""Everything that autopar knows about ops, in one record per family (`family.OpFamily`).

A record says how the ops split over one mesh axis, their FLOPs and bytes, what autograd saves, their memory format and
their special kernels.  The records are the `FAMILIES` of the files in this folder, which are discovered automatically:
`pointwise`, `products`, `attention` ...  `declaration` explains the language of factor rules.
"""

from autopar.ops.creation import filled_with
from autopar.ops.family import OpCall, OpFamily, packet_name
from autopar.ops.registry import (
    LAUNCHING_NAMESPACE,
    RuleMatch,
    count_work,
    family_of,
    is_cheap,
    is_fused,
    options_for,
    own_families,
    register_rule,
    registered_targets,
    result_order,
    with_rule,
)
from autopar.ops.work import Work

__all__ = [
    "LAUNCHING_NAMESPACE",
    "OpCall",
    "OpFamily",
    "RuleMatch",
    "Work",
    "count_work",
    "family_of",
    "filled_with",
    "is_cheap",
    "is_fused",
    "options_for",
    "own_families",
    "packet_name",
    "register_rule",
    "registered_targets",
    "result_order",
    "with_rule",
]
