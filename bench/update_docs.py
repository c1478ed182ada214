"""Writes the measured figures of all pages from the runs in bench/figures/: `make figures`.

A page has three kinds of marks, all of which end with `<!-- end -->`:

    <!-- figures: RUN -->                       everything of a run: command, conditions, tables
    <!-- figures: RUN; GROUP; GROUP -->         the same, with the tables of these groups
    <!-- table: NAME -->                        a table of bench/figures/tables.toml
    <!-- figure: RUN; GROUP; NAME; SIDE -->     one figure, within a sentence

RUN is a file in bench/figures/, which README.md there describes. GROUP, NAME and SIDE name a figure
of one measurement of the run; GROUP may be left out if only one measurement has the NAME. `SIDE /
SIDE` is the ratio of the first to the second, above 1 if the first is better. `<!-- figure: RUN;
date -->` is the day of the run.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.bench import report
from mlxpool.bench.measurement import OURS, Figures, Measurement

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "bench" / "figures"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARK = re.compile(r"<!-- (figures|table|figure): ([^>]+?) -->(.*?)<!-- end -->", re.DOTALL)
WHOLE_FROM = 100  # figures of at least this value have no decimals in tables and sentences
LEVEL = 0.95  # runs of one program differ by this much; a lower ratio is shown in bold


class Row(Struct, frozen=True):
    """A row of a table: one or more measurements of one group.

    Each contestant has a cell with its figures of these measurements.
    """

    run: str
    group: str
    title: str
    names: tuple[str, ...]
    beside: str = ""  # the side that ours is compared with; "": none
    ours: str = OURS  # our side, or several with ` / ` between them


class Table(Struct, frozen=True):
    """A table of a page.

    `beside`: the contestant of the second column in most rows, and the heading of this column.
    `sides`: the contestants that are columns, instead of ours and `beside`; `SIDE / SIDE` is a
    ratio. `places`: each row names its machine and day; otherwise a line below the table names
    them.
    """

    rows: tuple[Row, ...]
    beside: str = ""
    sides: tuple[str, ...] = ()
    places: bool = False


def read_tables(file: Path) -> dict[str, Table]:
    """Reads the tables of a TOML file by name: fields of Table, and rows with fields of Row."""
    return {
        name: Table(
            tuple(Row(**{**row, "names": tuple(row["names"])}) for row in fields.pop("rows")),
            **{**fields, "sides": tuple(fields.get("sides", ()))},
        )
        for name, fields in tomllib.loads(file.read_text("utf-8")).items()
    }


TABLES = read_tables(FIGURES / "tables.toml")


# ---- figures -------------------------------------------------------------------------------------


@cache
def run_of(name: str) -> Figures:
    """Reads a saved run. Raises ValueError for an unknown name."""
    file = FIGURES / name
    if not file.is_file():
        raise ValueError(f"there is no run {name!r} in {FIGURES}; there are {saved_runs()}")
    return report.read(file)


def saved_runs() -> list[str]:
    return sorted(str(file.relative_to(FIGURES)) for file in FIGURES.glob("*/*.json"))


def line_of(run: str, name: str, group: str = "") -> Measurement:
    """Returns the measurement of a run with this name and group; `group` "" allows any group.

    Raises ValueError unless the run has exactly one such measurement.
    """
    lines = run_of(run).lines
    matching = [line for line in lines if line.name == name and group in ("", line.group)]
    if len(matching) != 1:
        known = "; ".join(f"{line.group}; {line.name}" for line in lines)
        raise ValueError(
            f"{run} has {len(matching)} lines with the name {name!r} (group {group!r}), exactly 1"
            f" is required; known: {known}"
        )
    return matching[0]


def figure(line: Measurement, side: str) -> str:
    """Returns the median of a contestant (`side`), formatted for tables and sentences.

    Raises ValueError for an unknown side.
    """
    if side not in line.sides:
        raise ValueError(f"{line.group}; {line.name} has no side {side!r}: {list(line.sides)}")
    value = line.median(side)
    return f"{value:,.{0 if value >= WHOLE_FROM else line.digits}f}"


def ratio(line: Measurement, side: str, other: str) -> float:
    """Returns the ratio of the medians of two contestants: above 1 if the first is better."""
    figure(line, side), figure(line, other)  # raises for an unknown side
    above, below = line.median(side), line.median(other)
    return below / above if line.less_is_better else above / below


def shown(line: Measurement, side: str) -> str:
    """Returns the figure of contestant `side` as text; for "A / B", the ratio of A to B."""
    side, _, other = side.partition(" / ")
    return f"{ratio(line, side, other):.2f}" if other else figure(line, side)


def one_figure(mark: str) -> str:
    """Returns the content of `<!-- figure: MARK -->`. Raises ValueError for an unknown figure."""
    match [part.strip() for part in mark.split(";")]:
        case [run, "date"]:
            return report.day_of(run_of(run).date)
        case [run, name, side]:
            return shown(line_of(run, name), side)
        case [run, group, name, side]:
            return shown(line_of(run, name, group), side)
    raise ValueError(f"{mark!r} must be RUN; GROUP; NAME; SIDE, or RUN; date")


# ---- tables --------------------------------------------------------------------------------------


def table(name: str) -> str:
    """Returns the named table of TABLES with its conditions. Raises ValueError for another name."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {sorted(TABLES)}")
    settings = TABLES[name]
    columns = settings.sides or (OURS, settings.beside, "ratio")
    head = ["", *columns, *(["on"] if settings.places else [])]
    rows = [_cells(row, settings) for row in settings.rows]
    parts = [report.table(head, rows)]
    if not settings.places:
        parts.append(" ".join(_conditions(settings.rows)))
    return "\n\n".join(parts) + "\n"


def _cells(row: Row, of: Table) -> list[str]:
    lines = [line_of(row.run, name, row.group) for name in row.names]
    title = f"{row.title}, {lines[0].unit}"
    if of.sides:
        return [title, *(" / ".join(shown(line, side) for line in lines) for side in of.sides)]
    ours = [figure(line, side) for line in lines for side in row.ours.split(" / ")]
    cells = [title, " / ".join(ours), "", ""]
    if row.beside:
        label = "" if row.beside == of.beside else f"{row.beside}: "
        cells[2] = label + " / ".join(figure(line, row.beside) for line in lines)
        ratios = [ratio(line, row.ours, row.beside) for line in lines]
        cells[3] = " / ".join(
            f"**{value:.2f}**" if value < LEVEL else f"{value:.2f}" for value in ratios
        )
    return [*cells, *([_place(run_of(row.run))] if of.places else [])]


def _place(run: Figures) -> str:
    machine = re.split(r"[;,]", run.machine)[0]
    return f"{machine}, {report.day_of(run.date)}"


def _conditions(rows: Sequence[Row]) -> Iterator[str]:
    """Yields a sentence for each machine, day and commit, with the groups measured there."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        run = run_of(row.run)
        place = f"{run.machine}, {report.day_of(run.date)}, commit {run.commit}"
        known = groups.setdefault(place, [])
        known += [row.group] if row.group not in known else []
    for place, names in groups.items():
        yield (
            f"{place[0].upper()}{place[1:]}."
            if len(groups) == 1
            else (f"{', '.join(names)}: {place}.")
        )


# ---- pages ---------------------------------------------------------------------------------------


def whole(mark: str) -> str:
    """Returns the content of `<!-- figures: MARK -->`. Raises ValueError for an unknown group.

    Tests run the command of each page with a stub in place of `mlxpool bench`. The stub cannot
    replace a command that needs a GPU or an earlier commit. The content then begins with a comment,
    which makes the tests skip the command.
    """
    name, *groups = (part.strip() for part in mark.split(";"))
    run = run_of(name)
    known = {line.group for line in run.lines}
    if unknown := set(groups) - known:
        raise ValueError(f"{name} has no group {sorted(unknown)}; it has {sorted(known)}")
    lines = tuple(line for line in run.lines if not groups or line.group in groups)
    stubbed = not re.search("python -m|git (show|worktree)", run.command)
    note = "" if stubbed else "<!-- not run: needs a GPU or an earlier commit -->\n"
    return note + report.markdown(replace(run, lines=lines))


def updated(page: str) -> str:
    """Returns the page with new text between each mark and its end.

    Raises ValueError if a mark names no known figure or table.
    """

    def between(match: re.Match[str]) -> str:
        kind, name, _ = match.groups()
        if kind == "figure":
            content = one_figure(name)
        else:
            content = f"\n\n{whole(name) if kind == 'figures' else table(name)}\n"
        return f"<!-- {kind}: {name} -->{content}<!-- end -->"

    return MARK.sub(between, page)


def main() -> int:
    for file in PAGES:
        page = file.read_text("utf-8")
        if (page_updated := updated(page)) != page:
            file.write_text(page_updated, "utf-8")
            print(f"wrote {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
