"""Files and names that pages mention exist, and the texts of links are words, not file names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

import make_architecture
from support.doc_blocks import FENCE

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTES = sorted(DOCS.glob("notes/*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *NOTES]
TOPS = "bench|broker|client|cli|common|deploy|docs|examples|gateway|tests|worker"
FILE = re.compile(  # does not match `COMMIT:FILE`, a file of the Git history
    rf"(?<![\w./~:-])((?:{TOPS})/[\w./-]+\.(?:cu|cuh|html|js|json|md|py|toml|yaml|yml|h))\b"
)
TEST = re.compile(r"\b(test_\w+)\b")
NOT_OURS = {"test_NAME"}  # placeholders for names that the reader chooses


@cache
def names_in_tests() -> frozenset[str]:
    """Returns every test function and every test file."""
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        names.add(path.stem)
        names |= set(re.findall(r"\bdef (test_\w+)", path.read_text("utf-8")))
    return frozenset(names)


def exists(path: str) -> bool:
    """Returns whether a file of the repository exists.

    The path may be short, as in architecture.md: worker/versions.py for
    worker/mlxpool/worker/versions.py.
    """
    top, _, rest = path.partition("/")
    short = top in make_architecture.SOURCES and make_architecture.folder_of(top) / rest
    return (ROOT / path).is_file() or bool(short and short.is_file())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    named = {name for name in FILE.findall(page.read_text("utf-8")) if "NAME" not in name}
    assert sorted(name for name in named if not exists(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    named = set(TEST.findall(text)) - NOT_OURS
    assert sorted(named - names_in_tests()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_text_of_a_link_to_a_page_is_its_subject(page: Path) -> None:
    """The text must not be a file name, which readers of the site do not know."""
    assert re.findall(r"\[([a-z-]+\.md)\]\(", page.read_text("utf-8")) == []
