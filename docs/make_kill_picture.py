"""Draws a stream whose worker is killed: `python docs/make_kill_picture.py`, docs/img/kill.svg.

Runs a pool, requests the same completion twice, and kills the worker of the second completion with
SIGKILL in mid-stream. The picture shows the measurement: when each token arrived at the client, the
end of the first worker and the start of the next, and the tokens on both sides of the kill with
their ids.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxpool.cli.admin import ask
from mlxpool.client import Client
from mlxpool.common.errors import BrokerLost

PICTURE = Path(__file__).parent / "img" / "kill.svg"
# deterministic: a token computed in a prefill has the same bits as in a decode step.
SETTINGS = """
[pool]
restart_delay = 0.1
[models."{name}"]
path = "builtin:{name}"
deterministic = true
"""
START_TIMEOUT = 60.0  # seconds until the broker answers
POLL = 0.01  # seconds between two checks of the workers


@dataclass(frozen=True, slots=True)
class Token:
    """A token as the client got it. `at`: seconds since the request was sent."""

    at: float
    position: int
    id: int
    text: str


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process. Times are seconds since the request was sent.

    `began`: the start of the process. `loaded`: the time when the worker was ready.
    """

    pid: int
    began: float
    loaded: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A stream whose worker was killed, and the ids of the same request without a kill."""

    model: str
    tokens: Sequence[Token]
    killed_at: float
    before: Worker
    after: Worker
    undisturbed: Sequence[int]


# ---- the measurement -----------------------------------------------------------------------------


@contextlib.contextmanager
def pool(model: str) -> Iterator[Path]:
    """Runs a broker inside the context; yields its run directory."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as name:
        folder = Path(name)
        (folder / "mlxpool.toml").write_text(SETTINGS.format(name=model))
        command = [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", name, "serve"]
        command += ["--state-dir", ""]
        with (folder / "broker.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--config", str(folder / "mlxpool.toml")], stdout=log, stderr=log
            )
        try:
            end = time.monotonic() + START_TIMEOUT
            while _workers(folder) is None:
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit((folder / "broker.log").read_text())
                time.sleep(POLL)
            yield folder
        finally:
            process.terminate()
            process.wait()


def _workers(folder: Path) -> dict[int, str] | None:
    """Returns the state of each worker by its pid; None if no broker answers."""
    try:
        return {row["pid"]: row["state"] for row in ask(folder, "ps")["workers"] if row["pid"]}
    except BrokerLost:
        return None


class Watch:
    """Observes the workers from its own thread until it is closed."""

    def __init__(self, folder: Path, began: float) -> None:
        self.seen: dict[int, float] = {}
        self.ready: dict[int, float] = {}
        self._folder, self._began = folder, began
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(POLL):
            for pid, state in (_workers(self._folder) or {}).items():
                now = time.monotonic() - self._began
                self.seen.setdefault(pid, now)
                if state == "ready":
                    self.ready.setdefault(pid, now)

    def wait_for_another(self, pid: int) -> None:
        """Waits at most START_TIMEOUT seconds until a worker with another pid was seen."""
        end = time.monotonic() + START_TIMEOUT
        while not {*self.seen} - {pid} and time.monotonic() < end:
            time.sleep(POLL)

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def worker(self, pid: int) -> Worker:
        return Worker(pid, self.seen[pid], self.ready.get(pid, self.seen[pid]))


def measure(model: str, prompt: str, tokens: int, kill_at: int) -> Measured:
    """Measures a stream whose worker is killed once `kill_at` tokens have arrived."""
    request: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0, "seed": 7}
    if model == "counting":
        request["prompt"] = prompt
    else:
        request["messages"] = _asked(prompt)
    with pool(model) as folder, Client(folder) as client:
        undisturbed = client.generate(model, **request).ids
        (victim,) = _workers(folder) or {}
        arrived: list[tuple[float, int, int]] = []
        killed_at = 0.0
        began = time.monotonic()
        watch = Watch(folder, began)
        try:
            with client.stream(model, **request) as stream:
                for delta in stream:
                    now = time.monotonic() - began
                    arrived += [(now, delta.pos + n, id) for n, id in enumerate(delta.ids)]
                    if not killed_at and len(arrived) >= kill_at:
                        os.kill(victim, signal.SIGKILL)
                        killed_at = time.monotonic() - began
            watch.wait_for_another(victim)
        finally:
            watch.close()
        texts = {id: client.detokenize(model, [id]) for id in {id for _, _, id in arrived}}
    (next_one,) = set(watch.seen) - {victim}
    return Measured(
        model,
        [Token(at, position, id, texts[id]) for at, position, id in arrived],
        killed_at,
        watch.worker(victim),
        watch.worker(next_one),
        undisturbed,
    )


def _asked(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def faults(measured: Measured) -> list[str]:
    """Returns a message for each difference from the stream without a kill."""
    messages = []
    if [token.position for token in measured.tokens] != list(range(len(measured.tokens))):
        messages.append("positions are lost, doubled or out of order")
    if [token.id for token in measured.tokens] != list(measured.undisturbed):
        messages.append("the ids are not those of the request without a kill")
    return messages


# ---- the picture ---------------------------------------------------------------------------------

WIDTH, HEIGHT = 900, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 24, 74, 300  # the edges of the plot
LANES = (318, 340)  # y of the bars of both worker processes
STRIP = 384  # y of the tokens before and after the kill
SHOWN = 7  # tokens of the strip on each side of the kill
FIRST, SECOND, KILL, INK, QUIET, LINES = (
    *("#1f5fbf", "#0a7d55", "#c62828", "#1f2328", "#59636e", "#d1d9e0"),
)
STYLE = (
    f"text{{font:13px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:{INK}}}"
    f".title{{font-size:17px;font-weight:600}}.quiet{{fill:{QUIET}}}.mono{{font-family:"
    "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px}"
    f".kill{{fill:{KILL};font-weight:600}}"
)


class Drawing:
    """Collects the elements of an SVG."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"'
            f' xml:space="preserve">{html.escape(text)}</text>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "") -> None:
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"'
            f' stroke-width="1.2"{dashes}/>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none"
    ) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"'
            f' fill="{fill}" stroke="{edge}"/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>')

    def svg(self, title: str) -> str:
        """Returns the SVG file's text. A white card behind the drawing fits any background."""
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            f' width="{WIDTH}" height="{HEIGHT}" role="img">\n<title>{html.escape(title)}</title>\n'
            f"<style>{STYLE}</style>\n"
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="10"'
            f' fill="#ffffff" stroke="{LINES}"/>\n{body}\n</svg>\n'
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Converts seconds and positions to pixels."""

    seconds: float
    positions: int

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(max(seconds, 0.0), self.seconds) / self.seconds

    def y(self, position: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * position / self.positions


def draw(measured: Measured) -> str:
    """Returns the picture as the text of an SVG file."""
    drawing, last = Drawing(), measured.tokens[-1]
    scale = Scale(last.at * 1.02, len(measured.tokens))
    drawing.text(20, 30, "A worker is killed in mid-stream; the stream goes on", "title")
    whole = not faults(measured)
    drawing.text(
        *(20, 51),
        f"One stream of {len(measured.tokens)} tokens from {measured.model}, a dot each."
        + (" All ids are those of a run without a kill." if whole else ""),
        "quiet",
    )
    _axes(drawing, scale)
    _events(drawing, scale, measured)
    _lanes(drawing, scale, measured)
    _strip(drawing, measured)
    return drawing.svg("A worker is killed in mid-stream; the stream goes on")


def _axes(drawing: Drawing, scale: Scale) -> None:
    step = next(
        seconds for seconds in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30) if scale.seconds / seconds <= 10
    )
    for number in range(int(scale.seconds / step) + 1):
        x = scale.x(number * step)
        drawing.line(x, TOP, x, BOTTOM, LINES)
        drawing.text(x, BOTTOM + 14, f"{number * step:g} s", "quiet", "middle")
    for share in (0, 0.5, 1):
        position = int(scale.positions * share)
        drawing.line(LEFT, scale.y(position), WIDTH - RIGHT, scale.y(position), LINES)
        drawing.text(LEFT - 8, scale.y(position) + 4, str(position), "quiet", "end")
    drawing.text(LEFT + 6, TOP + 14, "position", "quiet")


def _split(measured: Measured) -> tuple[list[Token], list[Token]]:
    """Returns the tokens of the first and of the second worker; the longest pause divides them."""
    tokens = list(measured.tokens)
    late = [n for n in range(1, len(tokens)) if tokens[n].at > measured.killed_at]
    at = max(late, key=lambda n: tokens[n].at - tokens[n - 1].at)
    return tokens[:at], tokens[at:]


def _events(drawing: Drawing, scale: Scale, measured: Measured) -> None:
    before, after = _split(measured)
    for tokens, colour in ((before, FIRST), (after, SECOND)):
        for token in tokens:
            drawing.dot(scale.x(token.at), scale.y(token.position), colour)
    x, y = scale.x(measured.killed_at), scale.y(after[0].position)
    drawing.line(x, TOP, x, LANES[0] + 14, KILL, "5 3")
    drawing.text(x + 8, TOP + 30, f"SIGKILL, process {measured.before.pid}", "kill")
    resumed = scale.x(after[0].at)
    drawing.line(x, y, resumed, y, INK, "2 3")
    pause = after[0].at - measured.killed_at
    drawing.text((x + resumed) / 2, y - 10, f"{pause:.2f} s", "", "middle")
    drawing.text(
        *((x + resumed) / 2, y + 20), f"position {after[0].position} follows", "quiet", "middle"
    )
    drawing.text((x + resumed) / 2, y + 36, f"position {before[-1].position}", "quiet", "middle")


def _lanes(drawing: Drawing, scale: Scale, measured: Measured) -> None:
    first, second = measured.before, measured.after
    killed, began, loaded = (
        scale.x(at) for at in (measured.killed_at, second.began, second.loaded)
    )
    drawing.text(LEFT - 8, LANES[0] + 12, "workers", "quiet", "end")
    drawing.box(LEFT, LANES[0], killed - LEFT, 16, FIRST)
    drawing.text(killed + 8, LANES[0] + 13, f"process {first.pid}: killed", "kill")
    end = WIDTH - RIGHT
    drawing.box(began, LANES[1], loaded - began, 16, "#ffffff", SECOND)
    drawing.box(loaded, LANES[1], end - loaded, 16, SECOND)
    drawing.text(began - 8, LANES[1] + 13, f"process {second.pid}: starts, loads", "", "end")


def _strip(drawing: Drawing, measured: Measured) -> None:
    """Draws the tokens before and after the kill: position, text and id."""
    before, after = (part for part in _split(measured))
    shown = [*before[-SHOWN:], *after[:SHOWN]]
    width = (WIDTH - LEFT - RIGHT) / len(shown)
    for label, y in (("position", STRIP), ("text", STRIP + 20), ("id", STRIP + 40)):
        drawing.text(LEFT - 8, y, label, "quiet", "end")
    for number, token in enumerate(shown):
        x, colour = LEFT + number * width, FIRST if number < len(before[-SHOWN:]) else SECOND
        drawing.box(x + 2, STRIP + 5, width - 4, 21, "#ffffff", colour)
        middle = x + width / 2
        drawing.text(middle, STRIP, str(token.position), "quiet", "middle")
        drawing.text(middle, STRIP + 20, _visible(token.text), "mono", "middle")
        drawing.text(middle, STRIP + 40, str(token.id), "mono quiet", "middle")
    x = LEFT + len(before[-SHOWN:]) * width
    drawing.line(x, STRIP - 12, x, STRIP + 44, KILL, "5 3")


def _visible(text: str) -> str:
    shown = text.replace("\n", "⏎").replace(" ", "␣")
    return shown if len(shown) < 8 else f"{shown[:6]}…"


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw a stream whose worker is killed.")
    parser.add_argument("--model", default="demo-chat", help="a built-in model")
    parser.add_argument("--prompt", default="Count to 90.")
    parser.add_argument("--tokens", type=int, default=400, help="at most")
    parser.add_argument("--kill-at", type=int, default=110, help="tokens before the kill")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args()
    measured = measure(given.model, given.prompt, given.tokens, given.kill_at)
    for fault in faults(measured):
        print(fault, file=sys.stderr)
    given.out.write_text(draw(measured), "utf-8")
    print(f"{given.out}: {len(measured.tokens)} tokens", file=sys.stderr)
    return 1 if faults(measured) else 0


if __name__ == "__main__":
    sys.exit(main())
