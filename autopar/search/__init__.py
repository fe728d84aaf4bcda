"""Search: from prices to a plan.  Inside a layer exact (`layer_problem`), across layers a shortest path (`chain`)."""

from autopar.search.across import search
from autopar.search.request import SearchRequest
from autopar.search.training import TrainingSpec

__all__ = ["SearchRequest", "TrainingSpec", "search"]
