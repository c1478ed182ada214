"""docs/benchmarks.md has the figures that were saved, as they were saved."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("pages", ROOT / "bench" / "pages.py")
assert SPEC is not None and SPEC.loader is not None
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)


def test_the_page_is_up_to_date() -> None:
    page = pages.PAGE.read_text("utf-8")
    assert pages.written(page) == page, "run: python bench/pages.py"


def test_every_saved_figure_is_on_the_page() -> None:
    saved = {str(file.relative_to(pages.FIGURES)) for file in pages.FIGURES.glob("*/*.json")}
    assert {block[2] for block in pages.BLOCK.finditer(pages.PAGE.read_text("utf-8"))} == saved
