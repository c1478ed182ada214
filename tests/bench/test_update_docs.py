"""Pages show the figures of the runs in bench/figures/, and no others."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlxpool.bench import report
from mlxpool.bench.measurement import OURS, Figures, Measurement
from support.doc_blocks import FENCE

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("update_docs", ROOT / "bench" / "update_docs.py")
assert SPEC is not None and SPEC.loader is not None
update_docs = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = update_docs  # dataclasses look up their module there
SPEC.loader.exec_module(update_docs)

FRONT = ("README.md", "docs/index.md")  # pages that show only speeds from a run
NUMBER = re.compile(r"(?<![\d,.])\d[\d,]*(?:\.\d+)?(?!,?\d)")
SPEED = re.compile(
    r"[\d.,]*\d (?:tokens/s|texts/s|tokens a second|ms|times (?:as fast|the tokens))"
)
# The least figures that are searched for; smaller figures are too common. benchmarks.md has a
# thousand figures of four digits that were written by hand, some of which agree by chance.
RARE, RARE_IN_BENCHMARKS = 1000, 10_000
FILES = update_docs.saved_runs()


def unmarked(page: str) -> str:
    """Returns a page without code, and without the parts between the comments that mark figures."""
    return FENCE.sub("", update_docs.MARK.sub("", page))


def rare_figures(run: Figures, least: float) -> Iterator[str]:
    """Yields the medians of a run that are at least `least` and not round, as pages show them."""
    for line in run.lines:
        for side in line.sides:
            if line.median(side) >= least and line.median(side) % 100:
                yield update_docs.figure(line, side)


# ---- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", update_docs.PAGES, ids=lambda page: page.name)
def test_a_page_shows_the_figures_of_the_runs(page: Path) -> None:
    text = page.read_text("utf-8")
    assert update_docs.updated(text) == text, "run: make figures"


@pytest.mark.parametrize("page", update_docs.PAGES, ids=lambda page: page.name)
def test_every_mark_has_its_end(page: Path) -> None:
    text = page.read_text("utf-8")
    begun = len(re.findall(r"<!-- (?:figures|figure|table): ", text))
    assert begun == len(update_docs.MARK.findall(text)) == text.count("<!-- end -->")


@pytest.mark.parametrize("page", update_docs.PAGES, ids=lambda page: page.name)
def test_no_figure_of_a_run_is_repeated_without_a_mark(page: Path) -> None:
    numbers = set(NUMBER.findall(unmarked(page.read_text("utf-8"))))
    least = RARE_IN_BENCHMARKS if page.name == "benchmarks.md" else RARE
    repeated = {name: numbers & {*rare_figures(update_docs.run_of(name), least)} for name in FILES}
    assert {name: copies for name, copies in repeated.items() if copies} == {}, "use a mark: figure"


@pytest.mark.parametrize("name", FRONT)
def test_every_speed_of_the_first_pages_comes_from_a_run(name: str) -> None:
    assert SPEED.findall(unmarked((ROOT / name).read_text("utf-8"))) == [], "use a mark: figure"


def test_every_saved_run_is_on_a_page() -> None:
    marks = [
        mark
        for page in update_docs.PAGES
        for mark in update_docs.MARK.finditer(page.read_text("utf-8"))
    ]
    tables = {mark[2] for mark in marks if mark[1] == "table"}
    rows = {row.run for name in tables for row in update_docs.TABLES[name].rows}
    named = {mark[2].split(";")[0] for mark in marks if mark[1] != "table"}
    assert rows | named == set(FILES)
    assert tables == set(update_docs.TABLES), "a table that no page shows"


# ---- runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_run_says_when_where_and_of_what_it_is(name: str) -> None:
    run = update_docs.run_of(name)
    assert Path(name).stem == run.what or run.what == "engine"
    assert run.about and run.machine and run.versions and report.day_of(run.date)
    ours = any(side.startswith(OURS) for line in run.lines for side in line.sides)
    assert run.command or not ours
    if "NVIDIA" in run.machine and ours:
        assert re.fullmatch(r"(before )?[0-9a-f]{8,40}", run.commit)
    named = [(line.group, line.name) for line in run.lines]
    assert len(named) == len(set(named)) > 0


# ---- the program ---------------------------------------------------------------------------------

LINES = (
    Measurement("8B", "all at once", "tokens/s", {OURS: (7052,), "other": (5996,)}, digits=0),
    Measurement("1B", "all at once", "tokens/s", {OURS: (22_833,)}, digits=0),
    Measurement("8B", "gap", "ms", {OURS: (16.5,), "other": (25.0,)}, less_is_better=True),
)
RUN = Figures(
    "run", "About.", "one card", "v", "mlxpool bench", LINES, date="2026-11-28", commit="0db159e7"
)


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Writes the figures of RUN into a temporary folder, which replaces bench/figures/."""
    (tmp_path / "here").mkdir()
    file = tmp_path / "here" / "run.json"
    report.write(file, RUN)
    monkeypatch.setattr(update_docs, "FIGURES", tmp_path)
    update_docs.run_of.cache_clear()
    yield file
    update_docs.run_of.cache_clear()


@pytest.mark.parametrize(
    ("mark", "shown"),
    [
        ("here/run.json; 8B; all at once; mlxpool", "7,052"),
        ("here/run.json; 1B; all at once; mlxpool", "22,833"),
        ("here/run.json; gap; mlxpool", "16.5"),
        ("here/run.json; 8B; all at once; mlxpool / other", "1.18"),
        ("here/run.json; gap; mlxpool / other", "1.52"),
        ("here/run.json; gap; other / mlxpool", "0.66"),
        ("here/run.json; date", "28 November 2026"),
    ],
)
def test_a_mark_encloses_one_figure(saved: Path, mark: str, shown: str) -> None:
    page = f"So <!-- figure: {mark} -->9<!-- end --> of it.\n"
    new_page = update_docs.updated(page)
    assert new_page == f"So <!-- figure: {mark} -->{shown}<!-- end --> of it.\n"
    assert update_docs.updated(new_page) == new_page != page


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("figure: here/none.json; gap; mlxpool", "there is no run 'here/none.json'"),
        ("figure: here/run.json; all at once; mlxpool", "has 2 lines"),
        ("figure: here/run.json; gaps; mlxpool", "has 0 lines"),
        ("figure: here/run.json; gap; vLLM", "has no side 'vLLM'"),
        ("figure: here/run.json; gap; mlxpool / vLLM", "has no side 'vLLM'"),
        ("figure: here/run.json; commit", "must be RUN; GROUP; NAME; SIDE"),
        ("figures: here/none.json", "there is no run"),
        ("table: none", "there is no table 'none'"),
    ],
)
def test_a_mark_that_names_nothing_is_refused(saved: Path, mark: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        update_docs.updated(f"<!-- {mark} -->9<!-- end -->")


def test_a_new_run_changes_the_page(saved: Path) -> None:
    page = update_docs.updated("<!-- figures: here/run.json -->\n<!-- end -->\n")
    assert "| all at once | 7,052" not in page  # the row has to name its unit
    assert "| all at once, tokens/s | 7,052 | 5,996 | **1.18** |" in page
    assert "28 November 2026; commit 0db159e7; v; one card." in page
    report.write(saved, replace(RUN, date="2026-11-29", lines=[replace(LINES[0], digits=1)]))
    update_docs.run_of.cache_clear()
    again = update_docs.updated(page)
    assert "29 November 2026; commit 0db159e7" in again and "7,052.0" in again


def test_a_table_names_machine_day_and_commit_of_its_runs(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = replace(RUN, date="2026-11-30", commit="12345678")
    report.write(saved.with_name("later.json"), later)
    row = update_docs.Row("here/run.json", "8B", "8B, all at once", ("all at once",), "other")
    next_row = update_docs.Row("here/later.json", "1B", "1B, all at once", ("all at once",))
    gaps = update_docs.Row("here/run.json", "8B", "gaps", ("gap", "gap"), "other")
    tables = {
        "one": update_docs.Table((row, gaps), "other"),
        "two": update_docs.Table((row, next_row), ""),
        "sides": update_docs.Table((row,), sides=("other", "mlxpool / other")),
    }
    monkeypatch.setattr(update_docs, "TABLES", tables)
    one, two, sides = map(update_docs.table, tables)
    assert "| 8B, all at once, tokens/s | 7,052 | 5,996 | 1.18 |" in one
    assert "| gaps, ms | 16.5 / 16.5 | 25.0 / 25.0 | 1.52 / 1.52 |" in one
    assert "One card, 28 November 2026, commit 0db159e7." in one
    assert "| 8B, all at once, tokens/s | 7,052 | other: 5,996 | 1.18 |" in two
    assert "| 1B, all at once, tokens/s | 22,833 |  |  |" in two
    assert "8B: one card, 28 November 2026, commit 0db159e7." in two
    assert "1B: one card, 30 November 2026, commit 12345678." in two
    assert "| 8B, all at once, tokens/s | 5,996 | 1.18 |" in sides


def test_a_ratio_below_level_is_bold(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(
        saved, replace(RUN, lines=[replace(LINES[0], sides={OURS: (90,), "other": (100,)})])
    )
    row = update_docs.Row("here/run.json", "8B", "8B", ("all at once",), "other")
    monkeypatch.setattr(update_docs, "TABLES", {"one": update_docs.Table((row,), "other")})
    assert "| 90 | 100 | **0.90** |" in update_docs.table("one")
