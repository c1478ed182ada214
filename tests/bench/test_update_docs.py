"""docs/benchmarks.md shows the saved figures unchanged."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("update_docs", ROOT / "bench" / "update_docs.py")
assert SPEC is not None and SPEC.loader is not None
update_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(update_docs)


def test_the_page_is_up_to_date() -> None:
    page = update_docs.PAGE.read_text("utf-8")
    assert update_docs.updated(page) == page, "run: python bench/update_docs.py"


def test_every_saved_figure_is_on_the_page() -> None:
    saved = {
        str(file.relative_to(update_docs.FIGURES)) for file in update_docs.FIGURES.glob("*/*.json")
    }
    assert {
        block[2] for block in update_docs.BLOCK.finditer(update_docs.PAGE.read_text("utf-8"))
    } == saved
