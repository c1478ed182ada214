"""Checks the traces of all processes after a run.

A stream is sound if its client got every id at its position, once, with the expected value, and one
end. The traces of the broker and the workers give the time from a fault to its detection.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TraceLine = Mapping[str, Any]


@dataclass(slots=True)
class Findings:
    """The result of `check`: ids (hexadecimal) of faulty streams by kind of error, and counts."""

    lost: list[str] = field(default_factory=list)  # a gap in the positions
    doubled: list[str] = field(default_factory=list)  # a position, or the end, came twice
    reordered: list[str] = field(default_factory=list)
    unexpected: list[str] = field(
        default_factory=list
    )  # ids after the end, or of an unknown stream
    wrong: list[str] = field(default_factory=list)  # an id other than the model's
    stuck: list[str] = field(default_factory=list)  # streams without an end
    short: list[str] = field(default_factory=list)  # streams that are `done` without all their ids
    ends: Counter[str] = field(default_factory=Counter)  # by reason or code
    streams: int = 0
    ids: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # stream -> workers that it lost
    detection_s: list[float] = field(default_factory=list)  # from a fault to the broker's reaction

    @property
    def sound(self) -> bool:
        """Whether nothing is lost, doubled, out of order, wrong or without an end."""
        return not (
            self.lost or self.doubled or self.reordered or self.unexpected or self.wrong
            or self.stuck or self.short
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Returns figures for a table."""
        return {
            "streams": self.streams,
            "ids": self.ids,
            "lost": len(self.lost),
            "doubled": len(self.doubled),
            "reordered": len(self.reordered),
            "unexpected": len(self.unexpected),
            "wrong": len(self.wrong),
            "stuck": len(self.stuck),
            "short": len(self.short),
            "ends": dict(self.ends),
            "hit": sum(1 for count in self.hits.values() if count),
        }


def read(folder: Path) -> list[dict[str, Any]]:
    """Returns the trace lines of all processes in order of time, without incomplete lines."""
    lines = []
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text("utf-8", "replace").splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                continue
    return sorted(lines, key=lambda line: float(line["t"]))


def check(lines: Sequence[TraceLine], expected: Mapping[str, Sequence[int]]) -> Findings:
    """Checks all streams, and returns the findings.

    `expected` maps the id of a stream to the token ids that it must have if it ends with `done`.
    """
    findings = Findings(streams=len(expected))
    streams: dict[str, list[TraceLine]] = defaultdict(list)
    for line in lines:
        if line["who"].startswith("client") and "id" in line:
            streams[line["id"]].append(line)
    for ident, wanted in expected.items():
        _check_stream(ident, wanted, streams.pop(ident, []), findings)
    findings.unexpected += [
        ident for ident, own in streams.items() if any(line["what"] == "taken" for line in own)
    ]
    _count_hits(lines, findings)
    findings.detection_s = detection(lines)
    return findings


def _check_stream(
    ident: str, wanted: Sequence[int], lines: Iterable[TraceLine], findings: Findings
) -> None:
    have: list[int] = []
    seen: set[int] = set()
    ends: list[str] = []
    for line in lines:
        if line["what"] == "end":
            ends.append(str(line.get("reason") or line.get("code")))
        elif line["what"] == "taken":
            if ends:
                findings.unexpected.append(ident)
            _check_position(ident, int(line["pos"]), len(line["ids"]), have, seen, findings)
            have += line["ids"]
    findings.ids += len(have)
    if have != list(wanted[: len(have)]):
        findings.wrong.append(ident)
    if not ends:
        findings.stuck.append(ident)
        return
    findings.ends[ends[0]] += 1
    if len(ends) > 1:
        findings.doubled.append(ident)
    if ends[0] in ("stop", "length") and len(have) != len(wanted):
        findings.short.append(ident)


def _check_position(
    ident: str, pos: int, count: int, have: list[int], seen: set[int], findings: Findings
) -> None:
    positions = set(range(pos, pos + count))
    if positions & seen:
        findings.doubled.append(ident)
    elif pos < len(have):
        findings.reordered.append(ident)
    elif pos > len(have):
        findings.lost.append(ident)
    seen |= positions


def _count_hits(lines: Iterable[TraceLine], findings: Findings) -> None:
    """Counts, for each stream, how often it was dispatched again after the first dispatch."""
    for line in lines:
        if line["who"] == "broker" and line["what"] == "work":
            findings.hits[line["id"]] += 1
    for ident in list(findings.hits):
        findings.hits[ident] -= 1


def detection(lines: Sequence[TraceLine]) -> list[float]:
    """Returns, for each fault that ends a worker, the seconds until the broker's reaction."""
    ended = [
        (line["t"], line["slot"]) for line in lines
        if line["who"] == "broker" and line["what"] == "exited"
    ]  # fmt: skip
    delays = []
    for line in lines:
        if line["what"] in ("fault", "killed"):
            slot = line.get("slot") or line["who"].removeprefix("worker-").replace("-", "/")
            after = [t for t, s in ended if s == slot and t >= line["t"]]
            if after:
                delays.append(min(after) - line["t"])
    return delays
