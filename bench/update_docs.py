"""Writes the measured figures of all pages from the runs in bench/figures/: `make figures`.

A page has three kinds of marks, all of which end with `<!-- end -->`:

    <!-- figures: RUN -->                       everything of a run: command, conditions, tables
    <!-- figures: RUN; GROUP; GROUP -->         the same, with the tables of these groups
    <!-- table: NAME -->                        one of TABLES
    <!-- figure: RUN; GROUP; NAME; SIDE -->     one figure, within a sentence

RUN is a file in bench/figures/, whose README.md says what it has. GROUP, NAME and SIDE are those of
a line of it; GROUP may be left out where one line alone has the NAME. `SIDE / SIDE` is how many
times as good the first is as the second. `<!-- figure: RUN; date -->` is the day of the run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from mlxpool.bench import report
from mlxpool.bench.measurement import OURS, Figures, Measurement

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "bench" / "figures"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARK = re.compile(r"<!-- (figures|table|figure): ([^>]+?) -->(.*?)<!-- end -->", re.DOTALL)
WHOLE_FROM = 100  # figures from here on are shown without decimals in tables and sentences
LEVEL = 0.95  # runs of one program differ by as much; a ratio below is shown in bold


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: one or several lines of one group, in one cell for each contestant."""

    run: str
    group: str
    title: str
    names: tuple[str, ...]
    beside: str = ""  # the side that ours are compared with; "": none
    ours: str = OURS  # the side, or several with ` / ` between them


@dataclass(frozen=True, slots=True)
class Table:
    """`beside`: the heading of the second column, which is the side of most rows.

    `sides`: columns instead of ours and the one beside it; `SIDE / SIDE` is a ratio.
    `places`: each row says of what machine and day it is; otherwise one line below the table does.
    """

    rows: tuple[Row, ...]
    beside: str = ""
    sides: tuple[str, ...] = ()
    places: bool = False


VLLM = "vLLM 0.26"
BOUND = "what the bytes allow"
SIXTEEN = "mlxpool in 16 bits"
LOAD = "llama-h200/load.json"
STREAMS = "llama-h200/streams.json"
GLM = "glm-h200/streams.json"
FOUR_BITS = "four-bits-h200/streams.json"
GROUP = "group-h200/groups.json"
STREAM_COUNTS = ("1 stream", "32 streams", "128 streams")
PROMPT = "a prompt of 4,096 tokens"


def _first_tokens(rate: int) -> tuple[str, ...]:
    return tuple(f"{rate} requests/s, first token {which}" for which in ("p50", "p99"))


TABLES = {
    "one-gpu": Table(
        beside=VLLM,
        rows=(
            Row(LOAD, "8B", "8B, mixed load, all at once", ("all at once",), VLLM),
            Row(LOAD, "8B", "8B, 12 requests/s, first token p50 / p99", _first_tokens(12), VLLM),
            Row(LOAD, "8B", "8B, 36 requests/s", ("36 requests/s",), VLLM),
            Row(LOAD, "8B", "8B, 36 requests/s, first token p50 / p99", _first_tokens(36), VLLM),
            Row(
                LOAD,
                "8B",
                "8B, 12 / 36 requests/s, between tokens p99",
                ("12 requests/s, between tokens p99", "36 requests/s, between tokens p99"),
                VLLM,
            ),
            Row(STREAMS, "8B", "8B, 1 / 32 streams", STREAM_COUNTS[:2], VLLM),
            Row(
                STREAMS,
                "8B",
                "8B, 128 streams behind prompts of 128 / 2,000",
                ("128 streams", "128 streams behind prompts of 2,000"),
                VLLM,
            ),
            Row(STREAMS, "8B", "8B, a prompt of 4,096", (PROMPT,), VLLM),
            Row(
                LOAD,
                "1B",
                "1B, mixed load, all at once / 90 requests/s",
                ("all at once", "90 requests/s"),
                VLLM,
            ),
            Row(STREAMS, "1B", "1B, 128 streams", ("128 streams",), VLLM),
            Row(STREAMS, "1B", "1B, a prompt of 4,096", (PROMPT,), VLLM),
            Row(FOUR_BITS, "4 bits", "8B in 4 bits, 1 / 32 / 128 streams", STREAM_COUNTS, SIXTEEN),
            Row(FOUR_BITS, "4 bits", "8B in 4 bits, a prompt of 4,096", (PROMPT,), SIXTEEN),
            Row(GLM, "GLM", "GLM-4.7-Flash, 1 / 32 / 128 streams", STREAM_COUNTS, BOUND),
        ),
    ),
    "elsewhere": Table(
        beside="beside it",
        places=True,
        rows=(
            Row(
                "mlx-lm-server-h200/end-to-end.json",
                "8B",
                "8B, 128 streams over the server",
                ("128 streams over the server",),
                "mlx_lm.server",
            ),
            Row(
                "end-to-end-cpu/end-to-end.json",
                "end to end",
                "demo, 8 streams over the server",
                ("8 streams",),
                "mlx_lm.server",
            ),
            Row(
                "texts-cpu/texts.json",
                "embedding",
                "embedding",
                ("pool",),
                "sentence-transformers",
            ),
            Row(
                "deaths-cpu/fault-recovery.json",
                "after a fault",
                "next token after a worker's death, from a second worker, p50 / p99",
                ("the next token, from a warm replica (262 streams)",),
                ours="p50 / p99",
            ),
        ),
    ),
    "two-gpus": Table(
        sides=(
            "one GPU",
            "two replicas",
            "group of two",
            "two replicas / one GPU",
            "group of two / one GPU",
        ),
        rows=(
            *(
                Row(GROUP, "two GPUs", name, (name,))
                for name in ("all at once", "1 stream", "128 streams", PROMPT)
            ),
            Row(GROUP, "two GPUs", "36 requests/s, first token p50 / p99", _first_tokens(36)),
            Row(
                GROUP,
                "two GPUs",
                "36 requests/s, between tokens p50 / p99",
                tuple(f"36 requests/s, between tokens {which}" for which in ("p50", "p99")),
            ),
        ),
    ),
}


# ---- figures -------------------------------------------------------------------------------------


@cache
def run_of(name: str) -> Figures:
    """Raises ValueError for a name that is no file of figures."""
    file = FIGURES / name
    if not file.is_file():
        raise ValueError(f"there is no run {name!r} in {FIGURES}; there are {saved_runs()}")
    return report.read(file)


def saved_runs() -> list[str]:
    return sorted(str(file.relative_to(FIGURES)) for file in FIGURES.glob("*/*.json"))


def line_of(run: str, name: str, group: str = "") -> Measurement:
    """`group` "": of any. Raises ValueError with the lines of the run unless it has one such."""
    lines = run_of(run).lines
    found = [line for line in lines if line.name == name and group in ("", line.group)]
    if len(found) != 1:
        known = "; ".join(f"{line.group}; {line.name}" for line in lines)
        raise ValueError(
            f"{run} has {len(found)} lines {group!r}; {name!r}, must be 1, of: {known}"
        )
    return found[0]


def figure(line: Measurement, side: str) -> str:
    """The median of a side, as tables and sentences show it. Raises ValueError for another side."""
    if side not in line.sides:
        raise ValueError(f"{line.group}; {line.name} has no side {side!r}: {list(line.sides)}")
    value = line.median(side)
    return f"{value:,.{0 if value >= WHOLE_FROM else line.digits}f}"


def ratio(line: Measurement, side: str, other: str) -> float:
    """How many times as good the median of a side is as that of another; above 1 is better."""
    figure(line, side), figure(line, other)  # both are there
    above, below = line.median(side), line.median(other)
    return below / above if line.less_is_better else above / below


def shown(line: Measurement, side: str) -> str:
    """The figure of a side, or the ratio of `SIDE / SIDE`."""
    side, _, other = side.partition(" / ")
    return f"{ratio(line, side, other):.2f}" if other else figure(line, side)


def one_figure(mark: str) -> str:
    """What `<!-- figure: MARK -->` encloses. Raises ValueError for a mark that names nothing."""
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
    """One of TABLES, with what it was measured on. Raises ValueError for another name."""
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {sorted(TABLES)}")
    found = TABLES[name]
    columns = found.sides or (OURS, found.beside, "ratio")
    head = ["", *columns, *(["on"] if found.places else [])]
    rows = [_cells(row, found) for row in found.rows]
    parts = [report.table(head, rows)]
    if not found.places:
        parts.append(" ".join(_conditions(found.rows)))
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
        cells[3] = " / ".join(f"**{one:.2f}**" if one < LEVEL else f"{one:.2f}" for one in ratios)
    return [*cells, *([_place(run_of(row.run))] if of.places else [])]


def _place(run: Figures) -> str:
    machine = re.split(r"[;,]", run.machine)[0]
    return f"{machine}, {report.day_of(run.date)}"


def _conditions(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each machine, day and commit, with the groups that were measured there."""
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
    """What `<!-- figures: MARK -->` encloses. Raises ValueError for a group that the run has not.

    Tests of pages run `mlxpool bench` and bench/ with a stub, and nothing else of these commands.
    """
    name, *groups = (part.strip() for part in mark.split(";"))
    run = run_of(name)
    known = {line.group for line in run.lines}
    if unknown := set(groups) - known:
        raise ValueError(f"{name} has no group {sorted(unknown)}; it has {sorted(known)}")
    lines = tuple(line for line in run.lines if not groups or line.group in groups)
    stubbed = not re.search("python -m|git show", run.command)
    note = "" if stubbed else "<!-- not run: needs a GPU or an earlier commit -->\n"
    return note + report.markdown(replace(run, lines=lines))


def updated(page: str) -> str:
    """The page with everything between marks made again. Raises ValueError for a wrong mark."""

    def between(found: re.Match[str]) -> str:
        kind, name, _ = found.groups()
        if kind == "figure":
            made = one_figure(name)
        else:
            made = f"\n\n{whole(name) if kind == 'figures' else table(name)}\n"
        return f"<!-- {kind}: {name} -->{made}<!-- end -->"

    return MARK.sub(between, page)


def main() -> int:
    for file in PAGES:
        page = file.read_text("utf-8")
        if (made := updated(page)) != page:
            file.write_text(made, "utf-8")
            print(f"wrote {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
