"""Search: from prices to a plan.

Candidates of a layer (`layer_candidates`) come from an exact search inside of it (`layer_problem`, `layer_solutions`,
`variable_elimination`).  Across layers, a chain of candidates is solved by dynamic programming (`chain_dp`) with a
price of memory (`lagrangian`), without stages (`single_stage`) and with them (`pipeline`).  `microbatches` says how a
batch may be divided, `constraints` what the user demands, `plan_selection` which plan is fastest when steps are
simulated.
"""

from autopar.search.call_search import plan_like, stage_constraints, stages_of
from autopar.search.plan_reuse import check_known, reuse_plan
from autopar.search.plan_search import search
from autopar.search.settings.request import MEMORY_ERROR, ConsideredPlan, SearchRequest
from autopar.step.training import TrainingSpec

__all__ = [
    "MEMORY_ERROR",
    "ConsideredPlan",
    "SearchRequest",
    "TrainingSpec",
    "check_known",
    "plan_like",
    "reuse_plan",
    "search",
    "stage_constraints",
    "stages_of",
]
