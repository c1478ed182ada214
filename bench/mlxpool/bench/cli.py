"""The command line of `mlxpool bench`. Scenarios and MLX are imported when a scenario runs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.common.process import private_temp

if TYPE_CHECKING:
    from mlxpool.bench.measurement import Figures, Measurement

# Each module has `about(options)`, the conditions in words, and `measure(options, progress)`, which
# yields measurements.
MODULES = {"load": "load.scenario", "routing": "routing.scenario"}
COUNTS = (
    *("rounds", "steps", "streams", "prompt", "prefill", "tokens", "clients", "turns", "rows"),
    *("requests", "sequences", "workers", "replicas", "devices"),
)
NUMBERS = (
    *("rate", "context", "warm_up", "memory_rate", "acceptance", "cache", "count", "layers"),
    *("slo_ttft", "slo_tpot", "slo_itl", "slo_e2el"),
)
LEFT_OUT = ("--out", "--api-key")  # flags that a saved command line does not have
LENGTHS = ("MEDIAN", "SIGMA", "MIN", "MAX")
PROMPT_LENGTHS = (270, 1.0, 16, 1500)  # prompt and output fit into the embedded model's context
OUTPUT_LENGTHS = (121, 0.7, 16, 512)
OBJECTIVES = {
    "ttft": "time to the first token",
    "tpot": "time per output token",
    "itl": "time between two pieces",
    "e2el": "time to the last token",
}
CPU_TIME = "figures of processor time, which depend less on the load of other programs"


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `bench` and its subcommands."""
    bench = commands.add_parser(
        "bench",
        help="measure this machine",
        description="Measures one part of mlxpool, in rounds, beside peers where they are"
        " installed, and prints tables with ratios. Starts a pool of its own where it needs one;"
        " `load` can measure a running one.",
    )
    kinds = bench.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for add in (
        *(_add_engine, _add_end_to_end, _add_load, _add_broker, _add_prefix, _add_routing),
        *(_add_groups, _add_speculation, _add_formats, _add_deaths, _add_checkpoint, _add_report),
    ):
        add(kinds, common)


def _add_engine(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "engine", "decode and prefill, in one process, beside mlx-lm")
    _model(parser)
    _flags(
        parser,
        streams=([1, 8], "rows that decode at once"),
        prompt=([128], "tokens of their prompts, which the rows take in turn"),
        prefill=([], "tokens of the timed prefills"),
        turn=(
            0,
            "tokens of a conversation: time the first token of its next turn, with and without the"
            " prefix cache",
        ),
        steps=(24, "decode steps of a burst"),
        deterministic=(False, "compare with the model setting of this name, on a CPU"),
        as_installed=(
            False,
            "beside mlx-lm as installed: without OpenBLAS, in the dtype of the files",
        ),
        memory_rate=(
            0.0,
            "GB/s of this machine's memory: also the share of the tokens/s that it allows, if a"
            " step reads needed weights, keys and values once, and experts are chosen evenly",
        ),
    )
    parser.add_argument(
        "--sampled",
        nargs="*",
        choices=("top_k", "top_p"),
        default=[],
        help="decode again with temperature 0.8 and top_p 0.9, with and without top_k 40",
    )
    parser.add_argument(
        "--beside",
        type=Path,
        metavar="CHECKOUT",
        help="beside the engine of another checkout; on a CPU by processor time, with one BLAS"
        " thread unless OPENBLAS_NUM_THREADS has more",
    )
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="PYTHON",
        help="beside llama.cpp, measured as with --beside; --model is a GGUF file, PYTHON that of"
        " an environment with llama-cpp-python",
    )


def _add_end_to_end(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "through broker, worker and client, beside the engine alone and mlx_lm.server"
    parser = _kind(kinds, common, "end-to-end", text)
    _model(parser)
    _flags(
        parser,
        streams=([1, 8], "streams at once"),
        prompt=(128, "bytes of a prompt"),
        tokens=(128, "tokens of a completion"),
        clients=(4, "client processes at most"),
        no_engine=(False, "without the engine alone, a third model in memory"),
    )


def _add_load(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "mixed load as users make it, on a pool and on any server with OpenAI's completions"
    parser = _kind(kinds, common, "load", text, rounds=3, peers=False)
    model_flags = _model(parser)
    model_flags.add_argument(
        "--running", default="", metavar="NAME", help="a model of the running pool"
    )
    _add_work(parser, [0.0])
    _flags(
        parser,
        sequences=(32, "of a pool of its own"),
        clients=(4, "processes that send"),
        against=("", "the URL of a server to compare, as http://127.0.0.1:8000"),
        against_model=("", "its model (its first one)"),
        against_text=(False, "send it text of about this many tokens instead of token ids"),
        api_key=("", "its key ($OPENAI_API_KEY)"),
        no_pool=(False, "measure that server alone"),
    )


def _add_work(parser: argparse.ArgumentParser, rates: list[float]) -> None:
    """Adds the flags that define a mixed load: lengths, rates, objectives."""
    for name, default in (("prompt", PROMPT_LENGTHS), ("output", OUTPUT_LENGTHS)):
        parser.add_argument(
            f"--{name}-lengths",
            type=float,
            nargs=len(LENGTHS),
            default=default,
            metavar=LENGTHS,
            help=f"tokens, log-normal ({' '.join(map(str, default))})",
        )
    parser.add_argument(
        "--rate", type=float, nargs="+", default=rates, metavar="PER_S", help="0: all at once"
    )
    parser.add_argument(
        "--warm-up", type=int, metavar="REQUESTS", help="before the first load (--requests)"
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate every output to its length (default)",
    )
    _flags(
        parser,
        requests=(128, "of a load"),
        context=(0, "tokens; of a pool of its own (as needed)"),
        seed=(0, "of lengths, ids and arrivals"),
        goodput=(False, "refuse to run without an --slo-…"),
        **{
            f"slo_{name}": (0.0, f"ms; goodput: longest {text}")
            for name, text in OBJECTIVES.items()
        },
    )


def _add_broker(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "broker", "the broker without a model, beside a bare relay")
    _flags(parser, seconds=(5.0, "of a paced round"))


def _add_prefix(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "prefix", "the use of the prefix cache, beside mlx-lm's")
    _model(parser)
    _flags(
        parser,
        conversations=(8, "that grow"),
        turns=(10, "of a conversation"),
        tokens=(4000, "of a conversation at its end"),
        disk=(
            False,
            "instead, of prefixes on disk: first tokens of a new conversation, after a restart,"
            " from memory; gaps of streams beside saving",
        ),
    )


def _add_routing(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "routing beside a policy that knows the future, on simulated or real workers"
    parser = _kind(kinds, common, "routing", text, rounds=3, peers=False)
    _flags(
        parser,
        workers=(4, "of the model"),
        cache=(0, "tokens that a worker caches (32000; real: 12000)"),
        slow=(1.0, "how many times slower one simulated worker is"),
        load=("", "only this one, such as chats"),
        recorded=("", "a file with a recorded load instead of random ones"),
        real=(False, "pools of real workers of the shape small"),
        rate=(4.0, "arrivals a second of real loads"),
        count=(
            0,
            "chats, agents or calls of a load (its own number; real: 16 agents or 120 calls)",
        ),
    )


def _add_groups(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "one model on several devices, beside replicas"
    parser = _kind(kinds, common, "groups", text, rounds=3, peers=False)
    _model(parser)
    _flags(
        parser,
        setup=(["1x1", "2x1", "1x2"], "pools: workers x devices of each"),
        streams=([1, 32, 128], "streams at once"),
        prompt=(128, "tokens of a prompt"),
        tokens=(128, "tokens of a completion"),
        prefill=(4096, "tokens of a long prompt"),
        clients=(4, "processes that send"),
    )
    parser.add_argument("--sequences", type=int, help="of a worker (the most streams)")
    parser.add_argument("--sums", choices=("auto", "nccl"), default="auto", help="device_sums")
    _add_work(parser, [])


def _add_speculation(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "speculation", "tokens/s with drafts and without", peers=False)
    _model(parser)
    parser.add_argument(
        "--speculation",
        choices=("off", "ngram", "mtp", "draft", "auto"),
        default="auto",
        help="source of drafts, as the setting of this name (auto); off: no drafts on either side,"
        " which shows how far equal batches differ",
    )
    _flags(
        parser,
        draft=("", "the draft model, as the setting of this name"),
        streams=([1, 8, 32, 128], "requests at once"),
        tokens=(128, "that each request generates"),
        loads=(
            ["edits", "completions", "sampled"],
            "kinds of prompts: a function of Python's library and its begin again under another"
            " name, the begin of one, the same with temperature 1",
        ),
        processor=(False, CPU_TIME),
        acceptance=(
            0.0,
            "drafts count as right with this chance, so random weights show what a shape gains",
        ),
    )


def _add_formats(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "tokens/s of a batch with formats, beside one without"
    parser = _kind(kinds, common, "formats", text, rounds=7, peers=False)
    _model(parser)
    _flags(
        parser,
        rows=([8, 32], "of a batch"),
        tokens=(96, "of each row"),
        processor=(False, CPU_TIME),
    )


def _add_deaths(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "how long streams wait after kills and stops of workers, ranks and brokers"
    parser = _kind(kinds, common, "deaths", text, rounds=3, peers=False)
    _flags(
        parser,
        model=("builtin:counting", "a reference; another than the default has to count to 90"),
        faults=(
            ["kill", "stop", "broker"],
            "kinds: SIGKILL or SIGSTOP of each process of a worker while it reads prompts and while"
            " it decodes, SIGKILL of the broker",
        ),
        streams=(8, "that run when a fault comes"),
        tokens=(400, "of each stream"),
        replicas=(3, "workers of the model"),
        devices=(1, "of each worker; more are a group"),
        limit=(1.5, "seconds; step_limit and prefill_limit"),
    )


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
    """Adds the parser of a scenario, with the flags that all scenarios have."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        name, parents=[common], help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.set_defaults(run=run)
    _flags(parser, rounds=(rounds, "of everything"))
    if peers:
        _flags(parser, no_peers=(False, "without anything but mlxpool"))
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="figures as JSON, tables, and pictures there"
    )
    return parser


def _model(parser: argparse.ArgumentParser) -> Any:
    """Adds the flags that choose a model; returns their group, whose flags exclude each other."""
    model_flags = parser.add_mutually_exclusive_group()
    model_flags.add_argument("--model", default="", metavar="PATH", help="a folder or a reference")
    _shape(parser, model_flags)
    return model_flags


def _shape(
    parser: argparse.ArgumentParser, model_flags: Any = None, *, required: bool = False
) -> None:
    text = "random weights of a known shape: small, llama-3.1-8b, …"
    (model_flags or parser).add_argument("--shape", default="", required=required, help=text)
    _flags(parser, layers=(0, "of the shape (all)"))
    parser.add_argument("--quantise", default="", metavar="MODE", help="affine, mxfp4, …")


def _flags(parser: argparse.ArgumentParser, **flags: tuple[Any, str]) -> None:
    """Adds a flag for each keyword, whose value is the default and the help text of the flag.

    A flag has the type of its default. A list takes several values of the type of its first value;
    an empty list takes integers.
    """
    for name, (default, text) in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, list):
            kind, shown = type([*default, 0][0]), " ".join(map(str, default)) or "none"
            many = "+" if default else "*"
            parser.add_argument(
                flag, type=kind, nargs=many, default=default, help=f"{text} ({shown})"
            )
        else:
            shown = f" ({default})" if default else ""
            parser.add_argument(flag, type=type(default), default=default, help=text + shown)


# ---- running -------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Measures, prints the tables, and saves them if --out is given."""
    check_options(options)
    from mlxpool.bench.pools import interrupt_at_signals, restart_with_openblas

    restart_with_openblas(["-P", "-m", "mlxpool.cli.main", *sys.argv[1:]])
    private_temp.use()
    from mlxpool.bench import report as pages
    from mlxpool.bench.measurement import Figures

    module = MODULES.get(options.kind, options.kind.replace("-", "_"))
    scenario = import_module(f"mlxpool.bench.{module}")
    interrupt_at_signals()
    lines: list[Measurement] = []
    about = scenario.about(options)
    with closing(scenario.measure(options, _print_progress)) as measurements:
        for line in measurements:  # closing ends the scenario's processes, also after an interrupt
            lines.append(line)
            _print_progress(pages.short(line))
    figures = Figures(
        options.kind,
        about,
        pages.machine(),
        pages.versions(),
        command_line(),
        tuple(lines),
        pages.today(),
    )
    if options.out is not None:
        _save(figures, options.out)
    print(json.dumps(figures.as_json()) if options.json else pages.markdown(figures), end="")
    return 0


def checkpoint(options: argparse.Namespace) -> int:
    """Writes a random model folder for `--model`."""
    from mlxpool.bench.checkpoint import write

    if options.folder.exists():
        raise ValueError(f"{options.folder} is there already; name a folder that is not")
    private_temp.use()
    write(options.folder, options.shape, layers=options.layers, quantise=options.quantise)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    result = {"folder": str(options.folder), "bytes": size}
    print(json.dumps(result) if options.json else f"wrote {options.folder}, {size:,} bytes")
    return 0


def report(options: argparse.Namespace) -> int:
    """Prints saved figures as tables."""
    from mlxpool.bench import report as pages

    saved = [pages.read(file) for file in options.files]
    if options.json:
        print(json.dumps([figures.as_json() for figures in saved]))
    else:
        print("\n".join(map(pages.markdown, saved)), end="")
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


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError naming a count below 1, or another number below 0."""
    for names, least in ((COUNTS, 1), (NUMBERS, 0)):
        for name in names:
            value = getattr(options, name, None)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not least <= number < math.inf:
                    flag = name.replace("_", "-")
                    raise ValueError(f"--{flag} {number:g} must be at least {least}")


def command_line() -> str:
    """Returns this command line without the flags --api-key and --out and their values."""
    words, shown = iter(sys.argv[1:]), ["mlxpool"]
    for word in words:
        flag, _, value = word.partition("=")
        if flag not in LEFT_OUT:
            shown.append(word)
        elif not value:
            next(words, "")
    return " ".join(shown)


def _print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
