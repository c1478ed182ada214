"""Writes a parsed diagram as SVG, in the colours of the page that it stands in."""

from __future__ import annotations

from html import escape
from itertools import pairwise

from drawing.layout import Placed, Point, Size, place
from drawing.parse import Arrow, Edge, Graph, Node, Note, Sequence, parse

CHAR, LINE = 7.1, 17.0  # pixels of a character and of a line, at 13 pixels
PAD_X, PAD_Y = 14.0, 9.0
TITLE = 24.0  # pixels above the nodes of a group
DOT = 14.0
MARGIN = 8.0
COLUMN_GAP, ROW = 40.0, 34.0
MIN_SCALE = 0.55  # a wider drawing is scrolled, not made smaller

HEAD = (
    '<svg class="diagram" xmlns="http://www.w3.org/2000/svg" role="img" '
    'viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" style="min-width: {3:.0f}px">'
    '<defs><marker id="{2}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    'markerHeight="7" orient="auto-start-reverse"><path class="head" d="M0 0L10 5L0 10z"/>'
    "</marker></defs>"
)


def render(text: str, name: str = "arrow") -> str:
    """The SVG of one Mermaid fence; `name` is the id of its arrow head, unique on a page.

    Raises ValueError for what `parse` does not know.
    """
    diagram = parse(text)
    if isinstance(diagram, Sequence):
        parts, size = _sequence(diagram, name)
    else:
        parts, size = _graph(diagram, (MARGIN, MARGIN), name)
    width, height = size[0] + 2 * MARGIN, size[1] + 2 * MARGIN
    return HEAD.format(width, height, name, MIN_SCALE * width) + "".join(parts) + "</svg>"


# ---- graphs --------------------------------------------------------------------------------------


def _lines(label: str) -> list[str]:
    return label.replace("<br>", "\n").split("\n")


def _text_size(label: str) -> Size:
    lines = _lines(label)
    return max(map(len, lines)) * CHAR, len(lines) * LINE


def _label(node: Node, graph: Graph) -> str:
    """With the events that keep it in its state below its name."""
    own = [e.label for e in graph.edges if e.source == e.target == node.id]
    return "<br>".join([node.label, *(f"↻ {each}" for each in own)])


def _size(node: Node, graph: Graph) -> Size:
    if node.shape == "dot":
        return DOT, DOT
    if node.group is not None:
        inner = _layout(node.group).size
        width = max(inner[0], len(node.label) * CHAR) + 2 * PAD_X
        return width, inner[1] + TITLE + PAD_Y
    width, height = _text_size(_label(node, graph))
    return width + 2 * PAD_X, height + 2 * PAD_Y


def _layout(graph: Graph) -> Placed:
    sizes = {name: _size(node, graph) for name, node in graph.nodes.items()}
    labels = {edge: _label_size(edge) for edge in graph.edges if edge.label}
    return place(graph, sizes, labels)


def _label_size(edge: Edge) -> Size:
    width, height = _text_size(edge.label)
    return width + 8, height


def _graph(graph: Graph, origin: Point, name: str) -> tuple[list[str], Size]:
    placed = _layout(graph)
    x0, y0 = origin
    parts: list[str] = []
    for route in placed.routes:
        points = [(x + x0, y + y0) for x, y in route.points]
        parts.append(_way(points, route.edge, name, across=graph.across))
    for route in placed.routes:
        if route.edge.label:
            at = (route.label_at[0] + x0, route.label_at[1] + y0)
            parts.append(_text(at, route.edge.label, "label", back=_label_size(route.edge)))
    for node in graph.nodes.values():
        x, y = placed.centres[node.id]
        parts += _node(node, graph, (x + x0, y + y0), name)
    return parts, placed.size


def _node(node: Node, graph: Graph, at: Point, name: str) -> list[str]:
    (x, y), (width, height) = at, _size(node, graph)
    if node.shape == "dot":
        return [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="{DOT / 2:.1f}"/>']
    radius = {"round": height / 2 if height < 40 else 14, "group": 6}.get(node.shape, 4)
    box = _box(x - width / 2, y - height / 2, (width, height), radius, node.shape)
    if node.group is None:
        return [box, _text(at, _label(node, graph), "name")]
    title = _text((x, y - height / 2 + TITLE / 2), node.label, "title")
    inner = _layout(node.group).size
    parts, _ = _graph(node.group, (x - inner[0] / 2, y - height / 2 + TITLE), name)
    return [box, title, *parts]


def _box(x: float, y: float, size: Size, radius: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" '
        f'height="{size[1]:.1f}" rx="{radius:.1f}"/>'
    )


def _text(at: Point, label: str, kind: str, *, back: Size | None = None) -> str:
    lines = _lines(label)
    top = at[1] - (len(lines) - 1) * LINE / 2
    parts = []
    if back is not None:
        parts.append(_box(at[0] - back[0] / 2, at[1] - back[1] / 2, back, 3, "back"))
    for number, line in enumerate(lines):
        y = top + number * LINE
        parts.append(f'<text class="{kind}" x="{at[0]:.1f}" y="{y:.1f}">{escape(line)}</text>')
    return "".join(parts)


def _way(points: list[Point], edge: Edge, name: str, *, across: bool) -> str:
    """A smooth line: each piece leaves and arrives in the direction of the ranks."""
    x, y = points[0]
    path = f"M{x:.1f} {y:.1f}"
    for (x1, y1), (x2, y2) in pairwise(points):
        if across:
            middle = (x1 + x2) / 2
            path += f"C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
        else:
            middle = (y1 + y2) / 2
            path += f"C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}"
    start = f' marker-start="url(#{name})"' if edge.both else ""
    dashed = ' stroke-dasharray="5 4"' if edge.dashed else ""
    return f'<path class="way" d="{path}" marker-end="url(#{name})"{start}{dashed}/>'


# ---- sequences -----------------------------------------------------------------------------------


def _sequence(diagram: Sequence, name: str) -> tuple[list[str], Size]:
    columns, width = _columns(diagram)
    top = MARGIN + LINE + 2 * PAD_Y
    bottom = top + ROW * (len(diagram.rows) + 1)
    parts = []
    for person, label in diagram.people.items():
        x, size = columns[person], (len(label) * CHAR + 2 * PAD_X, LINE + 2 * PAD_Y)
        line = f'x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}"'
        parts.append(f'<line class="life" {line}/>')
        parts.append(_box(x - size[0] / 2, MARGIN, size, 4, "box"))
        parts.append(_text((x, MARGIN + size[1] / 2), label, "name"))
    for number, row in enumerate(diagram.rows):
        y = top + ROW * (number + 1)
        parts.append(
            _note(row, columns, y) if isinstance(row, Note) else _arrow(row, columns, y, name)
        )
    return parts, (width, bottom - MARGIN)


def _columns(diagram: Sequence) -> tuple[dict[str, float], float]:
    """Centres of the columns, far enough apart for what is written between two of them."""
    names = list(diagram.people)
    half = {name: len(label) * CHAR / 2 + PAD_X for name, label in diagram.people.items()}
    centres = {names[0]: MARGIN + half[names[0]]}
    spans = []
    for row in diagram.rows:
        pair = (row.first, row.last) if isinstance(row, Note) else (row.source, row.target)
        left, right = sorted(map(names.index, pair))
        spans.append((left, right, len(row.label) * CHAR + 2 * PAD_X))
    for number, name in enumerate(names[1:], 1):
        at = centres[names[number - 1]] + half[names[number - 1]] + half[name] + COLUMN_GAP
        for left, right, width in spans:
            if right == number and left < right:
                at = max(at, centres[names[left]] + width)
        centres[name] = at
    alone = [(names[left], width / 2) for left, right, width in spans if left == right]
    margin = max([0.0, *(MARGIN + size - centres[name] for name, size in alone)])
    centres = {name: at + margin for name, at in centres.items()}
    rights = [centres[name] + width for name, width in alone]
    last = max([centres[names[-1]] + half[names[-1]], *rights])
    return centres, last - MARGIN


def _note(row: Note, columns: dict[str, float], y: float) -> str:
    left, right = sorted((columns[row.first], columns[row.last]))
    width = max(right - left + 2 * PAD_X, len(row.label) * CHAR + 2 * PAD_X)
    middle = (left + right) / 2
    box = _box(middle - width / 2, y - LINE / 2 - 5, (width, LINE + 8), 3, "note")
    return box + _text((middle, y - 1), row.label, "label")


def _arrow(row: Arrow, columns: dict[str, float], y: float, name: str) -> str:
    start, end = columns[row.source], columns[row.target]
    dashed = ' stroke-dasharray="5 4"' if row.dashed else ""
    if row.lost:
        end = start + (end - start) * 0.6
    middle, back = (start + columns[row.target]) / 2, (len(row.label) * CHAR, LINE - 4)
    text = _text((middle, y - 9), row.label, "label", back=back)
    line = f'<path class="way" d="M{start:.1f} {y:.1f}L{end:.1f} {y:.1f}"'
    if row.lost:
        cross = f"M{end - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10"
        return f'{text}{line}{dashed}/><path class="way" d="{cross}"/>'
    return f'{text}{line} marker-end="url(#{name})"{dashed}/>'
