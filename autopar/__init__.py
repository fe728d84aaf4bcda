"""autopar turns a single-device PyTorch model and a device mesh into a parallel model by the fastest plan that fits."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import parallelize, plan
    from autopar.balance import BatchPlanner
    from autopar.cluster import Cluster
    from autopar.data import balanced, shard_dataloader
    from autopar.lower.parameters.materialize import materialize
    from autopar.ops import register_rule
    from autopar.plan import Plan
    from autopar.verify import verify

__all__ = [
    "BatchPlanner", "Cluster", "Plan", "balanced", "materialize", "parallelize", "plan", "register_rule",
    "shard_dataloader", "verify",
]  # fmt: skip

__version__ = "0.1.0"

_HOMES = {
    "BatchPlanner": "autopar.balance",
    "Cluster": "autopar.cluster",
    "Plan": "autopar.plan",
    "balanced": "autopar.data",
    "materialize": "autopar.lower.parameters.materialize",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "register_rule": "autopar.ops",
    "shard_dataloader": "autopar.data",
    "verify": "autopar.verify",
}
_PACKAGES = ("balance", "data", "errors")  # whose names scripts use as autopar.balance.Lengths


def __getattr__(name: str) -> Any:
    """Load public names on first use, so that ``import autopar.search`` does not load torch (PEP 562)."""
    if name in _PACKAGES:
        return import_module(f"autopar.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def _function(name: str) -> property:
    """A property for a public function that shares its name with a module of the package.

    Importing that module would replace the function by the module, so the setter ignores the assignment.  The module
    can still be imported with ``from autopar.plan import ...``.
    """
    return property(lambda _package: __getattr__(name), lambda _package, _module: None)


class _Package(ModuleType):
    plan = _function("plan")
    verify = _function("verify")


sys.modules[__name__].__class__ = _Package
