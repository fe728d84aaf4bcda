"""The documentation as a site: every page is in its navigation, every public name and example on its page."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path

import pytest

import autopar

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = re.findall(r"[\w-]+\.md", navigation)
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md"))


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text()
    assert set(re.findall(r"^::: autopar\.(\w+)$", text, re.MULTILINE)) == {*autopar.__all__, "errors"}


@pytest.mark.parametrize("name", autopar.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    text = inspect.getdoc(getattr(autopar, name)) or ""
    assert re.search(r"^Example:\n.*>>> ", text, re.MULTILINE | re.DOTALL)


def test_every_example_is_listed() -> None:
    listed = re.findall(r"^\| `examples/(\w+\.py)` \|", (DOCS / "examples.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "examples").glob("*.py"))


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*DOCS.glob("*.md"), *REPOSITORY.glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)", page.read_text())]
    assert len(links) > 50
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_what_builds_the_site_is_apart_from_what_tests_need() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(each.startswith("mkdocs") for each in extras["docs"])
    assert not any(each.startswith("mkdocs") for each in extras["dev"])
