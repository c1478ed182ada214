"""The command line `mlxpool bench`. Imports MLX and the measurements only when a command runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.bench import runners
from mlxpool.common.process import private_temp

if TYPE_CHECKING:
    from mlxpool.bench.measurement import Figures, Measurement

COUNTS = (
    *("rounds", "steps", "streams", "prompt", "prefill", "tokens", "clients", "turns"),
    *("requests", "sequences"),
)
NUMBERS = (
    *("rate", "context", "warm_up", "memory_rate"),
    *("slo_ttft", "slo_tpot", "slo_itl", "slo_e2el"),
)
LEFT_OUT = ("--out", "--picture", "--api-key")  # flags that a saved command line does not have


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `bench` and its subcommands."""
    bench = commands.add_parser(
        "bench",
        help="measure this machine",
        description="Measures engine, end to end, mixed load, broker or prefix cache. Measures in"
        " rounds, beside peers where they are installed, and prints tables"
        " with ratios. Starts a pool of its own; `load` can measure a running one.",
    )
    kinds = bench.add_subparsers(dest="kind", metavar="WHAT", required=True)
    _add_engine(kinds, common)
    _add_end_to_end(kinds, common)
    _add_load(kinds, common)
    _add_broker(kinds, common)
    _add_prefix(kinds, common)
    _add_checkpoint(kinds, common)
    _add_report(kinds, common)


def _add_engine(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "engine", "decode and prefill, in one process, beside mlx-lm")
    _model(parser)
    _counts(parser, "--streams", [1, 8], "rows that decode at once")
    _counts(parser, "--prompt", [128], "tokens of their prompts, which the rows take in turn")
    _counts(parser, "--prefill", [], "tokens of prompts whose prefill is timed", many="*")
    parser.add_argument("--turn", type=int, default=0, help="tokens of a conversation's first turn")
    parser.add_argument(
        "--sampled",
        nargs="*",
        choices=("top_k", "top_p"),
        default=[],
        help="decode again with temperature 0.8 and top_p 0.9, with and without top_k 40",
    )
    parser.add_argument("--steps", type=int, default=24, help="decode steps of a burst (24)")
    parser.add_argument(
        "--deterministic", action="store_true", help="with the model setting of this name, on a CPU"
    )
    parser.add_argument(
        "--as-installed",
        action="store_true",
        help="beside mlx-lm as it comes: without OpenBLAS, in the dtype of the files",
    )
    parser.add_argument(
        "--memory-rate",
        type=float,
        default=0.0,
        metavar="GB/S",
        help="of this machine's memory: also print what decode reaches of the bound that it sets",
    )
    parser.add_argument(
        "--profile", action="store_true", help="where a decode step's time goes, and nothing else"
    )
    parser.set_defaults(run=run, measure=runners.run_engine)


def _add_end_to_end(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "through broker, worker and client, beside the engine alone and mlx_lm.server"
    parser = _kind(kinds, common, "end-to-end", text)
    _model(parser)
    _counts(parser, "--streams", [1, 8], "streams at once")
    parser.add_argument("--prompt", type=int, default=128, help="bytes of a prompt (128)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a completion (128)")
    parser.add_argument("--clients", type=int, default=4, help="client processes at most (4)")
    parser.add_argument(
        "--no-engine", action="store_true", help="without the engine alone, a third model in memory"
    )
    parser.set_defaults(run=run, measure=runners.run_end_to_end)


def _add_load(kinds: Any, common: argparse.ArgumentParser) -> None:
    from mlxpool.bench.load import options

    text = "mixed load as users make it, on a pool and on any server with OpenAI's completions"
    parser = _kind(kinds, common, "load", text, rounds=options.ROUNDS, peers=False)
    which = _model(parser)
    which.add_argument("--running", default="", metavar="NAME", help="a model of the running pool")
    options.add_flags(parser)
    parser.set_defaults(run=run, measure=runners.run_load)


def _add_broker(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "broker", "the broker without a model, beside a bare relay")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a paced round (5)")
    parser.set_defaults(run=run, measure=runners.run_broker)


def _add_prefix(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "prefix", "what the prefix cache gives back, beside mlx-lm's")
    _model(parser)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=4000, help="of a conversation at its end")
    parser.set_defaults(run=run, measure=runners.run_prefix)


def _add_checkpoint(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "write a model folder of a known shape with random weights"
    parser = kinds.add_parser("checkpoint", parents=[common], help=text)
    _shape(parser, required=True)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="that does not exist yet")
    parser.set_defaults(run=checkpoint)


def _add_report(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = kinds.add_parser("report", parents=[common], help="the tables of saved figures")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="as --out wrote them")
    parser.set_defaults(run=report)


def _kind(
    kinds: Any,
    common: argparse.ArgumentParser,
    name: str,
    text: str,
    *,
    rounds: int = 5,
    peers: bool = True,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, parents=[common], help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"of everything ({rounds})")
    if peers:
        parser.add_argument("--no-peers", action="store_true", help="without anything but mlxpool")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="figures as JSON, tables, and pictures there"
    )
    return parser


def _model(parser: argparse.ArgumentParser) -> Any:
    """Add the model's flags; returns the group of those that exclude each other."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", default="", metavar="PATH", help="a folder or a reference")
    _shape(parser, which)
    return which


def _shape(parser: argparse.ArgumentParser, which: Any = None, *, required: bool = False) -> None:
    text = "random weights of a known shape: small, llama-3.1-8b, …"
    (which or parser).add_argument("--shape", default="", required=required, help=text)
    parser.add_argument("--layers", type=int, default=0, help="of the shape (default: all)")
    parser.add_argument("--quantise", default="", metavar="MODE", help="affine, mxfp4, …")


def _counts(
    parser: argparse.ArgumentParser, name: str, default: list[int], text: str, many: str = "+"
) -> None:
    shown = " ".join(map(str, default)) or "none"
    parser.add_argument(name, type=int, nargs=many, default=default, help=f"{text} ({shown})")


# ---- running -------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Measure, print the tables, and save them if --out is given."""
    _check(options)
    from mlxpool.bench.pools import restart_with_openblas

    restart_with_openblas(["-P", "-m", "mlxpool.cli.main", *sys.argv[1:]])
    private_temp.use()
    from mlxpool.bench import report as pages
    from mlxpool.bench.measurement import Figures
    from mlxpool.bench.pools import interrupt_at_signals

    interrupt_at_signals()
    lines: list[Measurement] = []
    about, found = options.measure(options, _print_progress)
    with closing(found):  # ends what it started, also when interrupted here
        for line in found:
            lines.append(line)
            _print_progress(pages.short(line))
    figures = Figures(
        options.kind,
        about,
        pages.machine(),
        pages.versions(),
        _command(),
        tuple(lines),
        pages.today(),
    )
    if options.out is not None:
        _save(figures, options.out)
    if getattr(options, "picture", None) is not None:
        _draw_load(figures, options.picture)
    print(json.dumps(figures.as_json()) if options.json else pages.markdown(figures), end="")
    return 0


def checkpoint(options: argparse.Namespace) -> int:
    """Write a random model folder for `--model`."""
    from mlxpool.bench.checkpoint import write

    if options.folder.exists():
        raise ValueError(f"{options.folder} is there already; name a folder that is not")
    private_temp.use()
    write(options.folder, options.shape, layers=options.layers, quantise=options.quantise)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    told = {"folder": str(options.folder), "bytes": size}
    print(json.dumps(told) if options.json else f"wrote {options.folder}, {size:,} bytes")
    return 0


def report(options: argparse.Namespace) -> int:
    """Print saved figures as tables."""
    from mlxpool.bench import report as pages

    found = [pages.read(file) for file in options.files]
    if options.json:
        print(json.dumps([one.as_json() for one in found]))
    else:
        print("\n".join(map(pages.markdown, found)), end="")
    return 0


def _save(figures: Figures, folder: Path) -> None:
    from mlxpool.bench import charts
    from mlxpool.bench import report as pages

    folder.mkdir(parents=True, exist_ok=True)
    pages.write(folder / f"{figures.what}.json", figures)
    (folder / f"{figures.what}.md").write_text(pages.markdown(figures), encoding="utf-8")
    try:
        for file in charts.draw(figures, folder):
            _print_progress(f"wrote {file}")
    except ImportError as error:
        _print_progress(str(error))


def _draw_load(figures: Figures, file: Path) -> None:
    from mlxpool.bench import charts

    try:
        charts.draw_load(figures, file)
    except ImportError as error:
        _print_progress(str(error))
        return
    _print_progress(f"wrote {file}")


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError naming a count below 1, or another number below 0."""
    for names, least in ((COUNTS, 1), (NUMBERS, 0)):
        for name in names:
            value = getattr(options, name, None)
            for one in value if isinstance(value, list) else [value]:
                if one is not None and not least <= one < math.inf:
                    flag = name.replace("_", "-")
                    raise ValueError(f"--{flag} {one:g} must be at least {least}")


def _command() -> str:
    """The command line without the flags that say where output goes, and without keys."""
    words, kept = iter(sys.argv[1:]), ["mlxpool"]
    for word in words:
        flag, _, value = word.partition("=")
        if flag not in LEFT_OUT:
            kept.append(word)
        elif not value:
            next(words, "")
    return " ".join(kept)


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
