"""Factor rules: for each op, the ways in which it can be split over one mesh axis.

The language is explained in `autopar.rules.declaration`; the tables are in `pointwise`, `products`,
`reductions`, `views`, `indexing`, `normalization`, `spatial`, `creation` and `special`.
"""

from autopar.rules.registry import RuleMatch, options_for, register_rule, registered_targets

__all__ = ["RuleMatch", "options_for", "register_rule", "registered_targets"]
