"""Reads Mermaid flowcharts, state diagrams and sequence diagrams. Pure.

Only what the pages use is known; every other line raises ValueError, which fails the site's build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

START, END = "[*] start", "[*] end"  # the two dots of a state diagram


@dataclass(slots=True)
class Node:
    """A box, a dot, or a group of nodes. `shape` is box, round or dot."""

    id: str
    label: str
    shape: str = "box"
    group: Graph | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    source: str
    target: str
    label: str = ""
    dashed: bool = False
    both: bool = False  # an arrow head at each end


@dataclass(slots=True)
class Graph:
    """Nodes in the order of their first mention. `across`: ranks go from left to right."""

    across: bool = False
    nodes: dict[str, Node] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Arrow:
    """A message of a sequence diagram. `lost`: it does not arrive."""

    source: str
    target: str
    label: str
    dashed: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    first: str
    last: str
    label: str


@dataclass(slots=True)
class Sequence:
    """A sequence diagram; `people` maps ids to labels in the order of their columns."""

    people: dict[str, str] = field(default_factory=dict)
    rows: list[Arrow | Note] = field(default_factory=list)


NODE = re.compile(r'(\w+)(?:\["([^"]*)"\]|\("([^"]*)"\))?')
EDGE = re.compile(r"\s*(-->|<-->|-\.->|---)(?:\|([^|]*)\|)?\s*")
SUBGRAPH = re.compile(r'subgraph (\w+)\["([^"]*)"\]')
STATE = re.compile(r"(\[\*\]|\w+) --> (\[\*\]|\w+)(?:\s*:\s*(.*))?")
ALIAS = re.compile(r'state "([^"]*)" as (\w+)')
PERSON = re.compile(r"participant (\w+)(?: as (.*))?")
ARROW = re.compile(r"(\w+)\s*(->>|-->>|-x|--x)\s*(\w+)\s*:\s*(.*)")
NOTE = re.compile(r"Note over (\w+)(?:,\s*(\w+))?\s*:\s*(.*)")


def parse(text: str) -> Graph | Sequence:
    """The diagram in the text of one fence. Raises ValueError with the line that is not known."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("%%")]
    if not lines:
        raise ValueError("the diagram is empty")
    kind, *rest = lines
    if kind in ("flowchart LR", "flowchart TB"):
        return _flowchart(iter(rest), kind.endswith("LR"), nested=False)
    if kind == "stateDiagram-v2":
        return _states(rest)
    if kind == "sequenceDiagram":
        return _sequence(rest)
    raise ValueError(f"no diagram that is known here: {kind!r}")


def _flowchart(lines: Iterator[str], across: bool, *, nested: bool) -> Graph:
    graph = Graph(across)
    for line in lines:
        if line == "end" and nested:
            return graph
        if line.startswith("direction "):
            graph.across = line == "direction LR"
        elif (match := SUBGRAPH.fullmatch(line)) is not None:
            group = _flowchart(lines, across, nested=True)
            graph.nodes[match[1]] = Node(match[1], match[2], "group", group)
        else:
            _chain(graph, line)
    if nested:
        raise ValueError("a subgraph has no end")
    return graph


def _chain(graph: Graph, line: str) -> None:
    """Read `a --> b --> c`, or one node alone."""
    previous, position = _node(graph, line, 0)
    while position < len(line):
        arrow = EDGE.match(line, position)
        if arrow is None:
            raise ValueError(f"not known in a flowchart: {line!r}")
        following, position = _node(graph, line, arrow.end())
        label = (arrow[2] or "").strip().strip('"')
        dashed, both = arrow[1] == "-.->", arrow[1] == "<-->"
        graph.edges.append(Edge(previous, following, label, dashed, both))
        previous = following


def _node(graph: Graph, line: str, position: int) -> tuple[str, int]:
    match = NODE.match(line, position)
    if match is None:
        raise ValueError(f"not known in a flowchart: {line!r}")
    label = match[2] or match[3]
    known = graph.nodes.setdefault(match[1], Node(match[1], label or match[1]))
    if label:
        known.label = label
        known.shape = "round" if match[3] else "box"
    return match[1], match.end()


def _states(lines: list[str]) -> Graph:
    graph = Graph()
    for line in lines:
        if line.startswith("direction "):
            graph.across = line == "direction LR"
        elif (match := ALIAS.fullmatch(line)) is not None:
            graph.nodes[match[2]] = Node(match[2], match[1], "round")
        elif (match := STATE.fullmatch(line)) is not None:
            ends = (
                START if match[1] == "[*]" else match[1],
                END if match[2] == "[*]" else match[2],
            )
            for name in ends:
                shape = "dot" if name in (START, END) else "round"
                graph.nodes.setdefault(name, Node(name, name, shape))
            graph.edges.append(Edge(*ends, match[3] or ""))
        else:
            raise ValueError(f"not known in a state diagram: {line!r}")
    return graph


def _sequence(lines: list[str]) -> Sequence:
    found = Sequence()
    for line in lines:
        if (match := PERSON.fullmatch(line)) is not None:
            found.people[match[1]] = match[2] or match[1]
        elif (match := ARROW.fullmatch(line)) is not None:
            dashed, lost = match[2].startswith("--"), match[2].endswith("x")
            found.rows.append(Arrow(match[1], match[3], match[4], dashed, lost))
        elif (match := NOTE.fullmatch(line)) is not None:
            found.rows.append(Note(match[1], match[2] or match[1], match[3]))
        else:
            raise ValueError(f"not known in a sequence diagram: {line!r}")
    for row in found.rows:
        names = (row.first, row.last) if isinstance(row, Note) else (row.source, row.target)
        if not set(names) <= set(found.people):
            raise ValueError(f"no participant is declared for {row}")
    return found
