"""What autopar knows of ops, in one record for each family (`family.OpFamily`): how they split over one mesh axis,
what they compute and move, what they keep, their memory format, which special kernels run them.

The records are the `FAMILIES` of the files of this folder, which are found by themselves: `pointwise`, `products`,
`attention` ...; the language of factor rules is explained in `declaration`.
"""

from autopar.ops.family import OpCall, OpFamily, packet_name
from autopar.ops.registry import (
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
    "OpCall",
    "OpFamily",
    "RuleMatch",
    "Work",
    "count_work",
    "family_of",
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
