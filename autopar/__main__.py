"""The console script: ``autopar plan|explain|profile ...``, also ``python -m autopar plan ...``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from autopar import __version__
from autopar.host.garbage import collected_seldom

__all__ = ["main"]

_COMMANDS = {
    "plan": "autopar.explain.plan_command",
    "explain": "autopar.explain.cli",
    "profile": "autopar.profile.command",
}
_USAGE = """usage: autopar plan|explain|profile [options]

  autopar plan config.json --cluster 8x8xh100       the plan for a model on a cluster, in ten lines
  autopar explain config.json --cluster 8x8xh100    the same by layers: why, what if, what other choices cost
  autopar profile --output profile.json             measure this machine

autopar COMMAND --help lists the options of a command; autopar --version prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status; 2 if there is no such command."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[:1] == ["--version"]:
        sys.stdout.write(f"autopar {__version__}\n")
        return 0
    if argv[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        return 0
    if not argv or argv[0] not in _COMMANDS:
        sys.stderr.write(_USAGE)
        return 2
    with collected_seldom():
        return import_module(_COMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main())
