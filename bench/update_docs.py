"""Writes saved figures into docs/benchmarks.md, between the marks that name their file.

    mlxpool bench engine … --out bench/figures/NAME   # measures and saves
    python bench/update_docs.py                       # updates the page

`<!-- figures: NAME/engine.json -->` and `<!-- end -->` enclose each block of the page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mlxpool.bench import report

HERE = Path(__file__).parent
FIGURES = HERE / "figures"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BLOCK = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def updated(page: str, figures: Path = FIGURES) -> str:
    """The page with every block made from its file again."""

    def block(found: re.Match[str]) -> str:
        return f"{found[1]}\n{report.markdown(report.read(figures / found[2]))}\n{found[3]}"

    return BLOCK.sub(block, page)


def main() -> int:
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
