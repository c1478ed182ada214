"""The fenced blocks of a page, and a shell that runs them in order, for tests of docs/.

A `console` block has commands behind `$ ` (a line that ends with `\\` goes on) and below each what
it prints. There `…` stands for anything in a line, and a line of only `…` for any lines. A `python`
block is a program. Blocks of one page share a folder and a shell, so a broker that one starts in
the background is there for the next. A block that cannot be run has the reason above it:

    <!-- not run: needs a GPU -->
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
REASON = re.compile(r"<!-- not run: (.+) -->\s*\Z")
RUN = frozenset({"console", "python"})
PATIENCE = 500  # seconds for a whole page; this only bounds a failure


@dataclass(frozen=True, slots=True)
class Block:
    """`line` is that of its fence; `reason` is why it is not run, "" if it is."""

    kind: str
    text: str
    line: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a page and what it should print; None: that is not said."""

    command: str
    printed: str | None
    line: int


def blocks(page: str) -> list[Block]:
    """Every fenced block of a page."""
    found = []
    for match in FENCE.finditer(page):
        reason = REASON.search(page[: match.start()])
        line = page.count("\n", 0, match.start()) + 1
        found.append(Block(match[1], match[2], line, reason[1] if reason else ""))
    return found


def steps(page: str) -> Iterator[Step]:
    """What is run of a page, in order."""
    for block in blocks(page):
        if block.reason:
            continue
        if block.kind == "console":
            yield from _of_console(block)
        elif block.kind == "python":
            program = shlex.quote(block.text)
            yield Step(f"printf %s {program} > block.py && python block.py", None, block.line)


def _of_console(block: Block) -> Iterator[Step]:
    command: list[str] = []
    printed: list[str] = []
    begun = 0
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            if command:
                yield Step("\n".join(command), "\n".join(printed), begun)
            command, printed, begun = [line.removeprefix("$ ")], [], number
        elif command and not printed and command[-1].endswith("\\"):
            command.append(line)
        else:
            assert command, f"line {number}: a console block begins with `$ `"
            printed.append(line)
    if command:
        yield Step("\n".join(command), "\n".join(printed), begun)


def run(
    wanted: Sequence[Step], folder: Path, environment: Mapping[str, str]
) -> list[tuple[Step, int, str]]:
    """Run a page's steps in one shell; each with its exit code and what it printed.

    Whatever a step started in the background is ended.
    """
    parts = [f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"']
    for number, step in enumerate(wanted):
        parts.append(f"exec > out.{number} 2>&1\n{step.command}\necho $? > code.{number}")
        if step.command.rstrip().endswith("&"):
            parts.append("until mlxpool ps; do sleep 0.05; done > /dev/null 2>&1")
    script = folder / "page.sh"
    script.write_text("\n".join([*parts, "kill $(jobs -p) 2> /dev/null", "wait", "exit 0"]))
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


def agrees(printed: str, wanted: str) -> bool:
    """Whether a text is as a page shows it."""
    pattern = ""
    for line in wanted.strip("\n").splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pieces = (re.escape(piece) for piece in line.rstrip().split("…"))
            pattern += ".*?".join(pieces) + r"[ ]*\n"
    text = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None
