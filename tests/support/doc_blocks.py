"""The fenced blocks of a page, and a shell that runs them in order, for tests of docs/.

A `console` block has commands behind `$ ` (a line that ends with `\\` goes on) and below each what
it prints. There `…` stands for anything in a line, and a line of only `…` for any lines. A `sh`
block has commands alone, a `python` block is a program, or a test if it has one, and a `toml` block
settings: they become mlxpool.toml and are checked. Blocks of one page share a folder and a shell,
so a broker that one starts in the background is there for the next. Above a block may stand

    <!-- not run: needs a GPU -->       why it cannot be run
    <!-- figures differ -->             numbers and paths stand for any, spaces for spaces
    <!-- ends with 1 -->                the exit code of its last command
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from support import stand_ins

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
REASON = re.compile(r"<!-- not run: (.+) -->\s*\Z")
LOOSE = re.compile(r"<!-- figures differ -->\s*\Z")
ENDS = re.compile(r"<!-- ends with (\d+) -->\s*\Z")
RUN = frozenset({"console", "python", "sh", "toml"})
PATIENCE = 500  # seconds for a whole page; this only bounds a failure


@dataclass(frozen=True, slots=True)
class Block:
    """`line` is that of its fence; `reason` is why it is not run, "" if it is.

    `loose`: its figures differ; `ends`: the exit code of its last command.
    """

    kind: str
    text: str
    line: int
    reason: str = ""
    loose: bool = False
    ends: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a page and what it should print; None: that is not said."""

    command: str
    printed: str | None
    line: int
    loose: bool = False
    ends: int = 0


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page."""
    found = []
    for match in FENCE.finditer(page):
        above = page[: match.start()]
        reason, ends = REASON.search(above), ENDS.search(above)
        found.append(
            Block(
                match[1],
                match[2],
                above.count("\n") + 1,
                reason[1] if reason else "",
                LOOSE.search(above) is not None,
                int(ends[1]) if ends else 0,
            )
        )
    return found


def steps(page: str) -> Iterator[Step]:
    """What is run of a page, in order."""
    for block in blocks(page):
        if block.reason or block.kind not in RUN:
            continue
        found = list(_of(block))
        yield from found[:-1]
        yield replace(found[-1], ends=block.ends)


def _of(block: Block) -> Iterator[Step]:
    if block.kind == "console":
        yield from _of_console(block)
    elif block.kind == "sh":
        lines = block.text.replace("\\\n", " ").splitlines()
        yield from (Step(line, None, block.line) for line in lines)
    elif block.kind == "python":
        name, text = "block.py", block.text
        if "\ndef test_" in text:
            name, run = "test_block.py", "pytest -q -p no:cacheprovider"
        else:
            run = "python"
        yield Step(f"printf %s {shlex.quote(text)} > {name} && {run} {name}", None, block.line)
    else:
        text = f"printf %s {shlex.quote(block.text)} > mlxpool.toml"
        check = "mlxpool config check --config mlxpool.toml"
        yield Step(f"{text} && {check}", None, block.line)


def _of_console(block: Block) -> Iterator[Step]:
    command: list[str] = []
    printed: list[str] = []
    begun = 0

    def step() -> Step:
        return Step("\n".join(command), "\n".join(printed), begun, block.loose)

    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            if command:
                yield step()
            command, printed, begun = [line.removeprefix("$ ")], [], number
        elif command and not printed and command[-1].endswith("\\"):
            command.append(line)
        else:
            assert command, f"line {number}: a console block begins with `$ `"
            printed.append(line)
    if command:
        yield step()


def run(
    wanted: Sequence[Step], folder: Path, environment: Mapping[str, str]
) -> list[tuple[Step, int, str]]:
    """Run a page's steps in one shell; each with its exit code and what it printed.

    Whatever a step started in the background is ended.
    """
    stand_ins.put_into(folder / "stand_ins")
    path = f"{folder / 'stand_ins'}:{Path(sys.executable).parent}"
    parts = [f'export PATH={shlex.quote(path)}:"$PATH"']
    for number, step in enumerate(wanted):
        parts.append(f"exec > out.{number} 2>&1\n{step.command}\necho $? > code.{number}")
        if step.command.partition(" #")[0].rstrip().endswith("&"):
            parts.append("until mlxpool ps; do sleep 0.05; done > /dev/null 2>&1")
            if step.printed:
                parts.append(f"until [ -s out.{number} ]; do sleep 0.05; done")
    script = folder / "page.sh"
    services = f"cat {shlex.quote(environment.get(stand_ins.PLACE, '.'))}/run/*.pid"
    ends = [f"kill $(jobs -p) $({services} 2> /dev/null) 2> /dev/null", "wait", "exit 0"]
    script.write_text("\n".join([*parts, *ends]))
    process = subprocess.Popen(["bash", script.name], cwd=folder, env=environment)
    try:
        process.wait(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            _end_children(process.pid)
            process.kill()
        process.wait()
    return [(step, *_result(folder, number)) for number, step in enumerate(wanted)]


def _end_children(pid: int) -> None:
    import psutil

    for child in psutil.Process(pid).children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass


def _result(folder: Path, number: int) -> tuple[int, str]:
    code = folder / f"code.{number}"
    text = (folder / f"out.{number}").read_text()
    return int(code.read_text()) if code.exists() else -1, text


FIGURE = re.compile(r"(?:/[\w.-]+)+|\d[\d,.:]*")


def agrees(printed: str, wanted: str, *, loose: bool = False) -> bool:
    """Whether a text is as a page shows it."""
    if loose:
        printed, wanted = (re.sub(" +", " ", FIGURE.sub("0", text)) for text in (printed, wanted))
    pattern = ""
    for line in wanted.strip("\n").splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pieces = (re.escape(piece) for piece in line.rstrip().split("…"))
            pattern += ".*?".join(pieces) + r"[ ]*\n"
    text = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None
