"""Predicted beside measured: ``python benchmarks/accuracy.py WHAT``, WHAT a module of `benchmarks.predictions`.

``published`` compares published training runs with what their configurations should take; ``layers`` the seconds of
every layer kind of the model zoo on this machine; ``memory`` what a rank allocates; ``gpu`` steps on one NVIDIA GPU.
``python benchmarks/accuracy.py WHAT --help`` says more.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_MODULES = Path(__file__).parent / "predictions"


def main() -> int:
    """Run what the command line says; returns the exit status."""
    names = sorted(path.stem for path in _MODULES.glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=names)
    options, rest = parser.parse_known_args(sys.argv[1:2])
    module = importlib.import_module(f"benchmarks.predictions.{options.what}")  # only this one: some need torch
    own = argparse.ArgumentParser(
        prog=f"accuracy.py {options.what}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(own)
    chosen = own.parse_args([*rest, *sys.argv[2:]])
    versions = f"autopar {version('autopar')}, torch {version('torch')}, Python {platform.python_version()}"
    print(f"# {' '.join(sys.argv)}: {versions}")
    return module.run(chosen)


if __name__ == "__main__":
    sys.exit(main())
