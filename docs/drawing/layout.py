"""Places the nodes and edges of a graph in ranks (Sugiyama's method). Pure.

Cycles are broken, each node gets a rank below its predecessors, an edge that passes ranks gets a
point in each, the order within a rank is improved by barycentres, and positions are the least
squares solution that keeps the order and the gaps. Ranks go down; a graph that goes across is laid
out with x and y exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from drawing.parse import Edge, Graph

GAP = 26.0  # pixels between neighbours of one rank
RANK_GAP = 30.0  # pixels between ranks
SWEEPS = 12
Size = tuple[float, float]
Point = tuple[float, float]


@dataclass(slots=True)
class Item:
    """A node, or the point of an edge in one rank. `x` and `y` are those of its centre."""

    width: float
    height: float
    rank: int
    x: float = 0.0
    y: float = 0.0
    above: list[Item] = field(default_factory=list)
    below: list[Item] = field(default_factory=list)
    real: bool = True


@dataclass(slots=True)
class Route:
    """The way of one edge, from its source to its target; `label_at` is the middle of its label."""

    edge: Edge
    points: list[Point]
    label_at: Point


@dataclass(slots=True)
class Placed:
    """Centres of nodes, ways of edges, and the size of the whole."""

    centres: dict[str, Point]
    routes: list[Route]
    size: Size


def place(graph: Graph, sizes: Mapping[str, Size], labels: Mapping[Edge, Size]) -> Placed:
    """Lay out a graph. Edges from a node to itself are not among the routes."""
    turn = graph.across
    edges = [edge for edge in graph.edges if edge.source != edge.target]
    for edge in edges:
        if edge.source not in sizes or edge.target not in sizes:
            raise ValueError(f"an edge must stay within its group: {edge}")
    step = 2 if any(edge.label for edge in edges) else 1  # a rank between for labels
    forward = _acyclic(list(sizes), edges)
    ranks = _ranks(list(sizes), forward, step)
    items = {name: Item(*_turned(sizes[name], turn), ranks[name]) for name in sizes}
    chains = [
        _chain(downward, items, _turned(labels.get(edge, (0.0, 0.0)), turn))
        for edge, downward in zip(edges, forward, strict=True)
    ]
    layers = _layers([*items.values(), *(item for chain in chains for item in chain[1:-1])])
    _order(layers)
    _place_across(layers)
    _place_down(layers)
    size = _move_to_origin(layers)
    routes = []
    ends = _ends(chains)
    for number, (edge, chain) in enumerate(zip(edges, chains, strict=True)):
        first, last = ends[number]
        points = [first, *((i.x, i.y) for i in chain[1:-1]), last]
        middle = chain[len(chain) // 2] if len(chain) > 2 else None
        at = (middle.x, middle.y) if middle else _between(first, last)
        if forward[number] != edge:
            points.reverse()
        routes.append(Route(edge, [_turned(p, turn) for p in points], _turned(at, turn)))
    centres = {name: _turned((item.x, item.y), turn) for name, item in items.items()}
    return Placed(centres, routes, _turned(size, turn))


def _turned(pair: tuple[float, float], turn: bool) -> tuple[float, float]:
    return (pair[1], pair[0]) if turn else pair


def _between(first: Point, last: Point) -> Point:
    return (first[0] + last[0]) / 2, (first[1] + last[1]) / 2


def _acyclic(names: list[str], edges: list[Edge]) -> list[Edge]:
    """The edges in their order, those that close a cycle turned round."""
    following: dict[str, list[int]] = {name: [] for name in names}
    for number, edge in enumerate(edges):
        following[edge.source].append(number)
    done: set[str] = set()
    path: set[str] = set()
    turned: set[int] = set()

    def visit(name: str) -> None:
        path.add(name)
        for number in following[name]:
            target = edges[number].target
            if target in path:
                turned.add(number)
            elif target not in done:
                visit(target)
        path.discard(name)
        done.add(name)

    for name in names:
        if name not in done:
            visit(name)
    return [
        Edge(e.target, e.source, e.label, e.dashed, e.both) if number in turned else e
        for number, e in enumerate(edges)
    ]


def _ranks(names: list[str], edges: list[Edge], step: int) -> dict[str, int]:
    """The longest way from a source; a source without predecessors moves down to its targets."""
    ranks = dict.fromkeys(names, 0)
    for _ in names:
        for edge in edges:
            ranks[edge.target] = max(ranks[edge.target], ranks[edge.source] + step)
    entered = {edge.target for edge in edges}
    for name in names:
        below = [ranks[edge.target] for edge in edges if edge.source == name]
        if name not in entered and below:
            ranks[name] = min(below) - step
    return ranks


def _chain(edge: Edge, items: Mapping[str, Item], label: Size) -> list[Item]:
    """The items of an edge from top to bottom; the one in the middle is as large as the label."""
    first, last = items[edge.source], items[edge.target]
    middle = (first.rank + last.rank + 1) // 2
    chain = [first]
    for rank in range(first.rank + 1, last.rank):
        size = label if rank == middle else (0.0, 0.0)
        chain.append(Item(*size, rank, real=False))
    chain.append(last)
    for above, below in pairwise(chain):
        above.below.append(below)
        below.above.append(above)
    if len(chain) > 2 and middle != chain[len(chain) // 2].rank:
        raise AssertionError("the label is not in the middle")
    return chain


def _layers(items: list[Item]) -> list[list[Item]]:
    layers: list[list[Item]] = [[] for _ in range(1 + max(item.rank for item in items))]
    for item in items:
        layers[item.rank].append(item)
    return layers


def _order(layers: list[list[Item]]) -> None:
    """Order each layer by the mean places of its neighbours; keep what crosses least."""
    best = [list(layer) for layer in layers]
    fewest = _crossings(layers)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else layers[::-1]:
            places = {id(i): n for other in layers for n, i in enumerate(other)}
            keys = {}
            for number, item in enumerate(layer):
                near = [places[id(i)] for i in (item.above if down else item.below)]
                keys[id(item)] = sum(near) / len(near) if near else float(number)
            layer.sort(key=lambda item: keys[id(item)])
        if (count := _crossings(layers)) < fewest:
            fewest, best = count, [list(layer) for layer in layers]
    for layer, found in zip(layers, best, strict=True):
        layer[:] = found


def _crossings(layers: list[list[Item]]) -> int:
    count = 0
    for upper, lower in pairwise(layers):
        places = {id(item): number for number, item in enumerate(lower)}
        ends = [sorted(places[id(below)] for below in item.below) for item in upper]
        flat = [end for group in ends for end in group]
        count += sum(a > b for number, a in enumerate(flat) for b in flat[number + 1 :])
    return count


def _place_across(layers: list[list[Item]]) -> None:
    for layer in layers:
        _spread(layer, [0.0] * len(layer))
    for sweep in range(4 * SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else layers[::-1]:
            wanted = []
            for item in layer:
                near = (item.above if down else item.below) or item.below or item.above
                wanted.append(sum(i.x for i in near) / len(near) if near else item.x)
            _spread(layer, wanted)


def _spread(layer: list[Item], wanted: list[float]) -> None:
    """Place a layer as near as it can be to the wanted positions, in order and with gaps.

    Least squares by pooling adjacent violators: what overlaps is joined and moves as one.
    """
    offsets = [0.0]
    for left, right in pairwise(layer):
        offsets.append(offsets[-1] + (left.width + right.width) / 2 + GAP)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for item, want, offset in zip(layer, wanted, offsets, strict=True):
        weight = 1.0 if item.real else 4.0  # long edges are to be straight
        block = (want - offset, weight, 1)
        while blocks and blocks[-1][0] >= block[0]:
            mean, heavy, count = blocks.pop()
            total = heavy + block[1]
            mean = (mean * heavy + block[0] * block[1]) / total
            block = (mean, total, count + block[2])
        blocks.append(block)
    number = 0
    for mean, _, count in blocks:
        for _ in range(count):
            layer[number].x = mean + offsets[number]
            number += 1


def _place_down(layers: list[list[Item]]) -> None:
    top = 0.0
    for layer in layers:
        height = max((item.height for item in layer), default=0.0)
        for item in layer:
            item.y = top + height / 2
        top += height + RANK_GAP


def _move_to_origin(layers: list[list[Item]]) -> Size:
    everything = [item for layer in layers for item in layer]
    left = min(item.x - item.width / 2 for item in everything)
    for item in everything:
        item.x -= left
    width = max(item.x + item.width / 2 for item in everything)
    return width, max(item.y + item.height / 2 for item in everything)


def _ends(chains: list[list[Item]]) -> list[tuple[Point, Point]]:
    """Where each edge leaves and enters its boxes: side by side, in the order of their ways."""
    leaving: dict[int, list[tuple[float, int]]] = {}
    entering: dict[int, list[tuple[float, int]]] = {}
    for number, chain in enumerate(chains):
        leaving.setdefault(id(chain[0]), []).append((chain[1].x, number))
        entering.setdefault(id(chain[-1]), []).append((chain[-2].x, number))
    firsts: dict[int, Point] = {}
    lasts: dict[int, Point] = {}
    for number, chain in enumerate(chains):
        top, bottom = chain[0], chain[-1]
        firsts[number] = _port(top, leaving[id(top)], number), top.y + top.height / 2
        lasts[number] = _port(bottom, entering[id(bottom)], number), bottom.y - bottom.height / 2
    return [(firsts[number], lasts[number]) for number in range(len(chains))]


def _port(item: Item, edges: list[tuple[float, int]], number: int) -> float:
    place = [which for _, which in sorted(edges)].index(number)
    return item.x + item.width * ((place + 1) / (len(edges) + 1) - 0.5)
