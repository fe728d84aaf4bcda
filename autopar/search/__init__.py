"""Search: from prices to a plan.  Inside a layer: `layer_problem`; across layers: `across`, `chain`."""

from autopar.search.across import search
from autopar.search.alike import plan_like
from autopar.search.request import MEMORY_ERROR, Considered, SearchRequest
from autopar.step.training import TrainingSpec

__all__ = ["MEMORY_ERROR", "Considered", "SearchRequest", "TrainingSpec", "plan_like", "search"]
