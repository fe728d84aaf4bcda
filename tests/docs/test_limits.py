"""The table of what is refused: each row's message is one of the package's, and its test exists and expects it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConstraintError

REPOSITORY = Path(__file__).parents[2]
LIMITS = (REPOSITORY / "docs" / "limits.md").read_text()
ROWS = re.findall(r"^\| (.*?) \| `(.*?)` \| .*? \| `(tests/\S+?)::(\w+)` \|$", LIMITS, re.MULTILINE)


@cache
def texts_of_the_package() -> str:
    """All that it could say, one constant a line."""
    trees = (ast.parse(path.read_text()) for path in (REPOSITORY / "autopar").rglob("*.py"))
    return "\n".join(
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_table_is_read_whole() -> None:
    assert len(ROWS) == LIMITS.count("::test_") >= 15


@pytest.mark.parametrize(("what", "message", "file", "test"), ROWS, ids=[row[0] for row in ROWS])
def test_each_row_has_a_test_of_its_message(what: str, message: str, file: str, test: str) -> None:
    assert message in texts_of_the_package()
    source = (REPOSITORY / file).read_text()
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert test in functions
    assert message in source.replace("\\", "")


def test_a_batch_that_does_not_divide() -> None:
    cluster = autopar.Cluster.of("cpu", devices_per_node=3)
    with pytest.raises(ConstraintError, match="a batch of 4 rows does not divide over 3 devices"):
        autopar.plan(nn.Linear(6, 6), cluster, (torch.ones(4, 6),), constraints=["data=3"])
