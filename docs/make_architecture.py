"""Makes the parts of docs/architecture.md from code: `python docs/make_architecture.py`.

The table of packages comes from their docstrings, the drawings of states from the tables of
transitions. A test compares the page with the result.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGE = DOCS / "architecture.md"
PART = re.compile(
    r"(<!-- made by docs/make_architecture.py: (\w+) -->\n)(.*?)(<!-- until here -->)", re.S
)

SOURCES = {  # folder of the sources of each package below mlxpool
    "bench": "bench", "broker": "broker", "cli": "client", "client": "client",
    "cluster": "cluster", "common": "common", "gateway": "gateway", "worker": "worker",
}  # fmt: skip
TABLE = re.compile(r"^TRANSITIONS\b", re.M)
SENTENCE = re.compile(r"(?<=[.])\s+(?=[A-Z`]|\w+\.py\b)")  # a sentence may begin with a file name
MANY = 3  # an event that leads from this many states to one state is listed below the drawing
Transitions = Mapping[Enum, Mapping[str, Enum]]


def folder_of(package: str) -> Path:
    """Returns the folder of a package such as `broker.core`."""
    top, *rest = package.split(".")
    return ROOT.joinpath(SOURCES[top], "mlxpool", top, *rest)


def packages(top: str) -> list[str]:
    """Returns the packages directly below a package, with names such as `broker.core`."""
    inner = sorted(path.parent.name for path in folder_of(top).glob("*/__init__.py"))
    return [f"{top}.{name}" for name in inner]


# ---- the table -----------------------------------------------------------------------------------


def table() -> str:
    """Returns a row for each package with its docstring. Inner packages follow their package."""
    rows = ["| package | is for |", "|---|---|"]
    for top in SOURCES:
        rows += [
            _row(top, f"**{top}**"),
            *(_row(inner, inner.removeprefix(f"{top}.")) for inner in packages(top)),
        ]
    return "\n".join(rows) + "\n"


def _row(package: str, name: str) -> str:
    module = importlib.import_module(f"mlxpool.{package}")
    text = " ".join((module.__doc__ or "").split()).replace("|", "\\|")
    text = SENTENCE.split(text)[0]
    if not text:
        raise ValueError(f"mlxpool.{package} has no docstring")
    return f"| {name} | {text} |"


# ---- states --------------------------------------------------------------------------------------


def states() -> str:
    """Returns a drawing for each module of the broker that has a table of transitions."""
    parts = []
    for path in sorted(folder_of("broker").rglob("*.py")):
        if TABLE.search(path.read_text("utf-8")):
            inner = path.relative_to(folder_of("broker")).with_suffix("")
            module = importlib.import_module(".".join(["mlxpool.broker", *inner.parts]))
            table: Transitions = module.TRANSITIONS
            name = re.sub("State$|Phase$", "", type(next(iter(table))).__name__) or inner.name
            parts += [f"### {name.capitalize()}\n\n`broker/{inner}.py`\n", state_diagram(table)]
    return "\n".join(parts)


def state_diagram(transitions: Transitions) -> str:
    """Returns the drawing of a state table. The table's first state is the initial state.

    An event that leads from many states to one state is a line of text below the drawing instead of
    many arrows.
    """
    first, *_ = transitions
    common = {way: froms for way, froms in _ways(transitions).items() if len(froms) >= MANY}
    lines = ["stateDiagram-v2", f"  [*] --> {first.value}"]
    for state, events in transitions.items():
        following: dict[Any, list[str]] = {}
        for event, after in events.items():
            if after is not state and (event, after) not in common:
                following.setdefault(after.value, []).append(event)
        for after, names in following.items():
            lines.append(f"  {state.value} --> {after}: {', '.join(names)}")
        if not events:
            lines.append(f"  {state.value} --> [*]")
    below = [
        f"- `{event}`: to {after.value} from {_listed(froms, transitions, after)}\n"
        for (event, after), froms in common.items()
    ]
    return _fence(lines) + ("\n" + "".join(below) if below else "")


def _ways(transitions: Transitions) -> dict[tuple[str, Enum], list[Enum]]:
    """Returns the transitions as a map from (event, target state) to the list of source states."""
    ways: dict[tuple[str, Enum], list[Enum]] = {}
    for state, events in transitions.items():
        for event, after in events.items():
            if after is not state:
                ways.setdefault((event, after), []).append(state)
    return ways


def _listed(froms: Sequence[Enum], transitions: Transitions, after: Enum) -> str:
    """Returns the names of the states `froms`, or "every other state but …" if that is shorter."""
    others = [state.value for state in transitions if state is not after and state not in froms]
    if not others:
        return "every other state"
    if 2 * len(others) < len(froms):
        return f"every other state but {', '.join(others)}"
    return ", ".join(state.value for state in froms)


def _fence(lines: list[str]) -> str:
    return "\n".join(["```mermaid", *lines, "```", ""])


# ---- the page ------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[], str]] = {
    "packages": table,
    "states": states,
}


def page() -> str:
    """Returns the page with its parts made anew. Raises KeyError for an unknown part."""
    return PART.sub(lambda match: match[1] + PARTS[match[2]]() + match[4], PAGE.read_text("utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
