"""Extracts the fenced blocks of a page of docs/ and runs them in order in one shell.

A `console` block has commands after `$ ` (a line that ends with `\\` continues), each followed by
its output. In the output `…` matches any text within a line, and a line of only `…` matches any
number of lines. A `sh` block has only commands. A `python` block is a program, or a test file if it
defines a test. A `toml` block is written to mlxpool.toml and checked. All blocks of a page share a
folder and a shell, so a broker that one block starts in the background serves the next block. A
comment above a block may be

    <!-- not run: needs a GPU -->       the reason why the block cannot be run
    <!-- figures differ -->             any numbers and paths match, and any number of spaces
    <!-- ends with 1 -->                the exit code of the block's last command
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from support import program_stubs

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
REASON = re.compile(r"<!-- not run: (.+) -->\s*\Z")
LOOSE = re.compile(r"<!-- figures differ -->\s*\Z")
ENDS = re.compile(r"<!-- ends with (\d+) -->\s*\Z")
RUNNABLE = frozenset({"console", "python", "sh", "toml"})
PATIENCE = 500  # seconds for a whole page; only bounds a failure


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page. `reason` is why it is not run; "" if it is run.

    `line` is the line number of its fence. `loose` is True if figures may differ from the page's.
    `ends` is the exit code of its last command.
    """

    kind: str
    text: str
    line: int
    reason: str = ""
    loose: bool = False
    ends: int = 0


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page, and its expected output; `printed` is None if any output is accepted."""

    text: str
    printed: str | None
    line: int
    loose: bool = False
    ends: int = 0


def blocks(page: str) -> list[Block]:
    """Returns every fenced block of a page."""
    fenced = []
    for match in FENCE.finditer(page):
        above = page[: match.start()]
        reason, ends = REASON.search(above), ENDS.search(above)
        fenced.append(
            Block(
                match[1],
                match[2],
                above.count("\n") + 1,
                reason[1] if reason else "",
                LOOSE.search(above) is not None,
                int(ends[1]) if ends else 0,
            )
        )
    return fenced


def commands(page: str) -> Iterator[Command]:
    """Yields the commands of a page, in order."""
    for block in blocks(page):
        if block.reason or block.kind not in RUNNABLE:
            continue
        of_block = list(_of(block))
        yield from of_block[:-1]
        yield replace(of_block[-1], ends=block.ends)


def _of(block: Block) -> Iterator[Command]:
    if block.kind == "console":
        yield from _of_console(block)
    elif block.kind == "sh":
        lines = block.text.replace("\\\n", " ").splitlines()
        yield from (Command(line, None, block.line) for line in lines)
    elif block.kind == "python":
        name, text = "block.py", block.text
        if re.search(r"^(?:def |\w+, )test_", text, re.MULTILINE):
            name, run = "test_block.py", "pytest -q -p no:cacheprovider"
        else:
            run = "python"
        yield Command(f"printf %s {shlex.quote(text)} > {name} && {run} {name}", None, block.line)
    else:
        text = f"printf %s {shlex.quote(block.text)} > mlxpool.toml"
        check = "mlxpool config check --config mlxpool.toml"
        yield Command(f"{text} && {check}", None, block.line)


def _of_console(block: Block) -> Iterator[Command]:
    words: list[str] = []
    printed: list[str] = []
    begun = 0

    def make() -> Command:
        return Command("\n".join(words), "\n".join(printed), begun, block.loose)

    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        if line.startswith("$ "):
            if words:
                yield make()
            words, printed, begun = [line.removeprefix("$ ")], [], number
        elif words and not printed and words[-1].endswith("\\"):
            words.append(line)
        else:
            assert words, f"line {number}: a console block begins with `$ `"
            printed.append(line)
    if words:
        yield make()


def run(
    page_commands: Sequence[Command], folder: Path, environment: Mapping[str, str]
) -> list[tuple[Command, int, str]]:
    """Runs commands in one shell; returns each command with its exit code and its output.

    Ends the background processes that the commands started.
    """
    program_stubs.put_into(folder / "program_stubs")
    path = f"{folder / 'program_stubs'}:{Path(sys.executable).parent}"
    parts = [f'export PATH={shlex.quote(path)}:"$PATH"']
    for number, command in enumerate(page_commands):
        parts.append(f"exec > out.{number} 2>&1\n{command.text}\necho $? > code.{number}")
        if command.text.partition(" #")[0].rstrip().endswith("&"):
            parts.append("until mlxpool ps; do sleep 0.05; done > /dev/null 2>&1")
            if command.printed:
                parts.append(f"until [ -s out.{number} ]; do sleep 0.05; done")
    script = folder / "page.sh"
    services = f"cat {shlex.quote(environment.get(program_stubs.ROOT_VARIABLE, '.'))}/run/*.pid"
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
    return [(command, *_result(folder, number)) for number, command in enumerate(page_commands)]


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


def agrees(printed: str, expected: str, *, loose: bool = False) -> bool:
    """Returns whether output matches the expected text of a page."""
    if loose:
        printed, expected = (
            re.sub(" +", " ", FIGURE.sub("0", text)) for text in (printed, expected)
        )
    pattern = ""
    for line in expected.strip("\n").splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pieces = (re.escape(piece) for piece in line.rstrip().split("…"))
            pattern += ".*?".join(pieces) + r"[ ]*\n"
    text = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None
