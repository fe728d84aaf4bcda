"""Search: from prices to a plan.

`layer`: an exact search inside each layer gives its candidates.  `chain`: across layers, dynamic programming with a
price of memory chooses one for each.  `pipeline`: the same with stages.  `microbatches` says how a batch may be
divided, `settings` what the user demands, `plan_selection` which plan is fastest when steps are simulated.
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
