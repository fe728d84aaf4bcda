"""Run the fast tests with other versions of torch and transformers, and write the result to docs/versions.md.

    make matrix                                         # every pair of `PAIRS`, in turn; some GB to download
    python benchmarks/matrix.py 2.15.0 5.23.0           # one pair

Each pair has an environment of its own in `.matrix/`, made when it is first asked for; `.venv` is left alone.  Tests
of packages that are optional are skipped there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "docs" / "versions.md"
# The oldest torch that pyproject.toml allows, those since, and the last transformers of either major version.
PAIRS = (
    ("2.11.0", "5.23.0"), ("2.13.0", "4.57.6"), ("2.13.0", "5.23.0"), ("2.14.1", "5.23.0"),
    ("2.14.1", "5.24.0"), ("2.15.0", "5.23.0"),
)  # fmt: skip
TESTS = ("tests",)
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "numpy", "rich", "accelerate", "plotly", "jinja2")
# What another torch or transformers needs in versions of its own.
_OF_THEIRS = re.compile(
    r"(torch|transformers|huggingface_hub|hf-xet|tokenizers|filelock|fsspec|Jinja2|MarkupSafe|mpmath|networkx|sympy"
    r"|typing_extensions|accelerate|httpx2|httpcore2|typer|safetensors)=="
)


def environment(torch: str, transformers: str) -> Path:
    """The Python of an environment with these versions."""
    folder = REPOSITORY / ".matrix" / f"torch-{torch}-transformers-{transformers}"
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
        constraints = folder / "constraints.txt"
        constraints.write_text("".join(f"{line}\n" for line in lines if not _OF_THEIRS.match(line)))
        wanted = [f"torch=={torch}", f"transformers=={transformers}", *TOOLS]
        subprocess.run([python, "-m", "pip", "install", "-q", "-c", constraints, *wanted], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-e", REPOSITORY], check=True)
        ready.touch()
    return python


def run_tests(python: Path, tests: list[str]) -> str:
    """What pytest says in its last line but for the time, with the names of tests that fail."""
    command = [
        python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal", "--show-capture=no",
        "--tb=line", "-m", "not slow",
    ]  # fmt: skip
    ended = subprocess.run([*command, *tests], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    print(ended.stdout[-4000:])
    last = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|error).*?) in [\d.]+s", ended.stdout, re.MULTILINE)
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?::(.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    said = re.sub(r", \d+ (?:deselected|warnings?)", "", last[-1]) if last else f"ended with {ended.returncode}"
    return said + (f": {', '.join(f'`{name}`' for name in failed)}" if failed else "")


def write_row(torch: str, transformers: str, tests: list[str], result: str) -> None:
    """The row of these versions in the table, in place of the one that is there."""
    text = TABLE.read_text()
    rows = [line for line in text.splitlines() if line.startswith("| 2.")]
    head = text[: text.index(rows[0])] if rows else text
    what = "all fast tests" if tests == list(TESTS) else " ".join(tests)
    key = f"| {torch} | {transformers} |"
    kept = [row for row in rows if not row.startswith(key)]
    TABLE.write_text(head + "".join(f"{row}\n" for row in sorted([*kept, f"{key} {what} | {result} |"])))


def main() -> None:
    """Run the pairs that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="of torch and of transformers; default: every pair")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="default: all")
    given = parser.parse_args()
    if len(given.versions) not in (0, 2):
        parser.error("give a version of torch and one of transformers, or none")
    for torch, transformers in [tuple(given.versions)] if given.versions else PAIRS:
        result = run_tests(environment(torch, transformers), given.tests)
        write_row(torch, transformers, given.tests, result)
        print(f"torch {torch}, transformers {transformers}: {result}")


if __name__ == "__main__":
    main()
