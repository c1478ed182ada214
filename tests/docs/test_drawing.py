"""docs/drawing: Mermaid's text is read exactly, and nothing is drawn over anything else."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations

import pytest

from drawing.layout import place
from drawing.parse import END, START, Arrow, Edge, Graph, Note, Sequence, parse
from drawing.svg import render

FLOW = """\
flowchart LR
  a["first<br>line"] -->|text| b("round")
  b -.-> c <--> a
  subgraph group["A group"]
    direction TB
    d --> e
  end
  c --> group
"""
STATES = """\
stateDiagram-v2
  [*] --> queued
  queued --> running: assign
  running --> queued: requeue
  running --> running: stream
  running --> [*]: finish
"""
TALK = """\
sequenceDiagram
  participant C as client
  participant B as broker
  C->>B: generate
  Note over C,B: time passes
  B--xC: delta
"""


def test_a_flowchart() -> None:
    graph = parse(FLOW)
    assert isinstance(graph, Graph) and graph.across
    assert list(graph.nodes) == ["a", "b", "c", "group"]
    assert graph.nodes["a"].label == "first<br>line" and graph.nodes["b"].shape == "round"
    assert graph.edges[0] == Edge("a", "b", "text")
    assert graph.edges[1].dashed and graph.edges[2].both
    inner = graph.nodes["group"].group
    assert inner is not None and not inner.across and inner.edges == [Edge("d", "e")]


def test_a_state_diagram() -> None:
    graph = parse(STATES)
    assert isinstance(graph, Graph)
    assert graph.edges[0] == Edge(START, "queued")
    assert graph.edges[-1] == Edge("running", END, "finish")


def test_a_sequence_diagram() -> None:
    found = parse(TALK)
    assert isinstance(found, Sequence) and found.people == {"C": "client", "B": "broker"}
    assert found.rows == [
        Arrow("C", "B", "generate"),
        Note("C", "B", "time passes"),
        Arrow("B", "C", "delta", dashed=True, lost=True),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pie\n",
        "flowchart LR\n  a ==> b",
        'flowchart LR\n  subgraph g["G"]\n  a --> b',
        "stateDiagram-v2\n  a -> b",
        "sequenceDiagram\n  participant A\n  A->>B: nobody declared B",
    ],
)
def test_what_is_not_known_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_an_edge_must_stay_within_its_group() -> None:
    graph = Graph(edges=[Edge("a", "b")])
    with pytest.raises(ValueError, match="within its group"):
        place(graph, {"a": (1.0, 1.0)}, {})


def test_nodes_and_labels_do_not_overlap() -> None:
    graph = parse(STATES + "  queued --> failed: fail\n  running --> failed: fail\n")
    assert isinstance(graph, Graph)
    sizes = dict.fromkeys(graph.nodes, (80.0, 30.0))
    labels = {edge: (50.0, 20.0) for edge in graph.edges if edge.label}
    placed = place(graph, sizes, labels)
    boxes = [(at, sizes[name]) for name, at in placed.centres.items()]
    boxes += [(r.label_at, labels[r.edge]) for r in placed.routes if r.edge.label]
    for (one, size), (other, other_size) in combinations(boxes, 2):
        apart = (abs(one[axis] - other[axis]) for axis in (0, 1))
        needed = ((size[axis] + other_size[axis]) / 2 for axis in (0, 1))
        assert any(a >= n for a, n in zip(apart, needed, strict=True)), (one, other)
    assert len(placed.routes) == len(graph.edges) - 1  # the loop is written into its node


WORDS = {
    FLOW: ("first", "round", "A group"),
    STATES: ("queued", "↻ stream"),
    TALK: ("client", "time passes"),
}


@pytest.mark.parametrize("text", WORDS)
def test_the_drawing_is_xml_with_every_text_in_it(text: str) -> None:
    drawing = ElementTree.fromstring(render(text))
    written = " ".join(drawing.itertext())
    assert all(word in written for word in WORDS[text])
    assert render(text) == render(text)
