"""Draws measured figures as PNG files.

Each table with figures for several numbers of streams or tokens is drawn as one file. All figures
of `bench load` are drawn as a single file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxpool.bench.measurement import Figures, Measurement
from mlxpool.bench.report import grouped

SIZE = (7.0, 4.0)  # inches
LOAD_SIZE = (9.0, 9.0)
LOAD_PANELS = (
    *("output token throughput", "request throughput"),
    *("TTFT median", "TTFT p99", "ITL median", "ITL p99"),
)
DPI = 120


def draw(figures: Figures, folder: Path) -> Iterator[Path]:
    """Draws figures; yields the files. Raises ImportError if matplotlib is missing."""
    _use_matplotlib()
    if figures.what == "load":
        yield _load_picture(figures, folder / "load.png")
        return
    for lines in grouped(figures.lines):
        if len({line.at for line in lines}) > 1:
            yield _picture(figures, lines, folder)
            if lines[0].unit == "tokens/s" and lines[0].name.endswith(("stream", "streams")):
                yield _picture(figures, [_latency(line) for line in lines], folder)


def _load_picture(figures: Figures, file: Path) -> Path:
    """Draws the figures of `bench load` over the request rate."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=LOAD_SIZE, layout="constrained")
    panels = [name for name in LOAD_PANELS if any(line.name == name for line in figures.lines)]
    all_axes = list(picture.subplots(-(-len(panels) // 2), 2, squeeze=False).flat)
    for axes, name in zip(all_axes, panels, strict=False):
        _panel(axes, [line for line in figures.lines if line.name == name])
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    picture.savefig(file, dpi=DPI, format="png")
    return file


def _panel(axes: Any, lines: Sequence[Measurement]) -> None:
    """Draws one metric against the request rate.

    The last position on the axis is "all at once": the load whose requests all start together.
    """
    ordered = sorted(lines, key=lambda line: line.at or float("inf"))
    places = range(len(ordered))
    for side in ordered[0].sides:
        medians = [line.median(side) for line in ordered]
        (drawn,) = axes.plot(places, medians, marker="o", label=side)
        low, high = ([end(line.sides[side]) for line in ordered] for end in (min, max))
        axes.fill_between(places, low, high, alpha=0.15, color=drawn.get_color(), linewidth=0)
    axes.set_xticks(places, [f"{line.at:g}" if line.at else "all at once" for line in ordered])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests/s")
    axes.set_title(f"{ordered[0].name}, {ordered[0].unit}", loc="left")
    _finish(axes)


def _use_matplotlib() -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'mlxpool[bench]'") from error
    matplotlib.use("agg")


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def _latency(line: Measurement) -> Measurement:
    """Converts tokens/s of all streams into milliseconds per token of each stream."""
    sides = {
        side: tuple(1000 * line.at / rate for rate in rates) for side, rates in line.sides.items()
    }
    return Measurement(
        f"{line.group}, a token", line.name, "ms", sides, line.at, less_is_better=True
    )


def _picture(figures: Figures, lines: Sequence[Measurement], folder: Path) -> Path:
    from matplotlib.figure import Figure

    picture = Figure(figsize=SIZE, layout="constrained")
    axes = picture.subplots()
    for side in dict.fromkeys(side for line in lines for side in line.sides):
        _curve(axes, side, [line for line in lines if side in line.sides])
    axes.set_xscale("log", base=2)
    axes.set_xticks([line.at for line in lines], [f"{line.at:,}" for line in lines])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens" if lines[0].name.endswith("tokens") else "streams")
    axes.set_ylabel(lines[0].unit)
    axes.set_title(lines[0].group, loc="left")
    _finish(axes)
    file = folder / f"{figures.what}-{_slug(lines[0])}.png"
    picture.savefig(file, dpi=DPI)
    return file


def _curve(axes: Any, side: str, lines: Sequence[Measurement]) -> None:
    """Draws the medians of a contestant, with a band from minimum to maximum."""
    at = [line.at for line in lines]
    (drawn,) = axes.plot(at, [line.median(side) for line in lines], marker="o", label=side)
    low = [min(line.sides[side]) for line in lines]
    high = [max(line.sides[side]) for line in lines]
    axes.fill_between(at, low, high, alpha=0.15, color=drawn.get_color(), linewidth=0)


def _slug(line: Measurement) -> str:
    kept = "".join(char if char.isalnum() else "-" for char in f"{line.group} {line.unit}".lower())
    return "-".join(filter(None, kept.split("-")))
