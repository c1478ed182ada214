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
LEFT_OUT = ("--out", "--api-key")  # flags that a saved command line omits
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
        " installed, and prints tables with ratios. Starts a pool of its own if it needs one;"
        " `load` can measure a running pool.",
    )
    kinds = bench.add_subparsers(dest="kind", metavar="WHAT", required=True)
    for add in (
        *(_add_engine, _add_end_to_end, _add_load, _add_broker, _add_prefix, _add_routing),
        *(_add_groups, _add_speculation, _add_formats, _add_deaths, _add_checkpoint, _add_report),
    ):
        add(kinds, common)


def _add_engine(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(
        kinds, common, "engine", "speed of decode and prefill in one process, beside mlx-lm"
    )
    _model(parser)
    _flags(
        parser,
        streams=([1, 8], "rows that decode at once"),
        prompt=([128], "tokens of the prompts, which the rows take in turn"),
        prefill=([], "tokens of the prompts of timed prefills"),
        turn=(
            0,
            "tokens of a conversation: time the first token of its next turn, with and without the"
            " prefix cache",
        ),
        steps=(24, "decode steps of a burst"),
        deterministic=(False, "compare with the model setting of this name, on a CPU"),
        as_installed=(
            False,
            "compare with mlx-lm as installed: without OpenBLAS, in the dtype of the files",
        ),
        memory_rate=(
            0.0,
            "GB/s of this machine's memory: also shows the share of the tokens/s that it allows,"
            " if a step reads needed weights, keys and values once, and experts are chosen evenly",
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
        help="compare with the engine of another checkout; on a CPU by processor time, with one"
        " BLAS thread unless OPENBLAS_NUM_THREADS has more",
    )
    parser.add_argument(
        "--llama-cpp",
        type=Path,
        metavar="PYTHON",
        help="compare with llama.cpp, as --beside does; --model is a GGUF file, PYTHON the"
        " interpreter of an environment with llama-cpp-python",
    )


def _add_end_to_end(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "speed through broker, worker and client, beside the engine alone and mlx_lm.server"
    parser = _kind(kinds, common, "end-to-end", text)
    _model(parser)
    _flags(
        parser,
        streams=([1, 8], "streams at once"),
        prompt=(128, "bytes of a prompt"),
        tokens=(128, "tokens of a completion"),
        clients=(4, "greatest number of client processes"),
        no_engine=(False, "do not measure the engine alone, which needs a third model in memory"),
    )


def _add_load(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "a mixed load like that of users, on a pool and on any server with OpenAI's completions"
    parser = _kind(kinds, common, "load", text, rounds=3, peers=False)
    model_flags = _model(parser)
    model_flags.add_argument(
        "--running", default="", metavar="NAME", help="a model of the running pool"
    )
    _add_work(parser, [0.0])
    _flags(
        parser,
        sequences=(32, "greatest number of requests that run at once in a pool of its own"),
        clients=(4, "processes that send"),
        against=("", "URL of a server to compare, such as http://127.0.0.1:8000"),
        against_model=("", "model of the server of --against (its first model)"),
        against_text=(False, "send that server text of about as many tokens, instead of token ids"),
        api_key=("", "key for that server ($OPENAI_API_KEY)"),
        no_pool=(False, "measure only the server of --against"),
    )


def _add_work(parser: argparse.ArgumentParser, rates: list[float]) -> None:
    """Adds the flags that define a mixed load: lengths, rates, objectives."""
    for name, default, kind in (
        ("prompt", PROMPT_LENGTHS, "a prompt"),
        ("output", OUTPUT_LENGTHS, "an output"),
    ):
        parser.add_argument(
            f"--{name}-lengths",
            type=float,
            nargs=len(LENGTHS),
            default=default,
            metavar=LENGTHS,
            help=f"log-normal number of tokens of {kind} ({' '.join(map(str, default))})",
        )
    parser.add_argument(
        "--rate",
        type=float,
        nargs="+",
        default=rates,
        metavar="PER_S",
        help="requests a second; 0: all at once",
    )
    parser.add_argument(
        "--warm-up",
        type=int,
        metavar="REQUESTS",
        help="requests before the first load (--requests)",
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate every output to its length (default)",
    )
    _flags(
        parser,
        requests=(128, "requests of a load"),
        context=(0, "context in tokens of a pool of its own (as needed)"),
        seed=(0, "seed of the random lengths, ids and arrivals"),
        goodput=(False, "fail without one of the objectives --slo-…"),
        **{
            f"slo_{name}": (0.0, f"objective of goodput: longest {text} in ms")
            for name, text in OBJECTIVES.items()
        },
    )


def _add_broker(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(
        kinds, common, "broker", "speed of the broker without a model, beside a bare relay"
    )
    _flags(parser, seconds=(5.0, "seconds of a paced round"))


def _add_prefix(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(kinds, common, "prefix", "the use of the prefix cache, beside mlx-lm's")
    _model(parser)
    _flags(
        parser,
        conversations=(8, "number of growing conversations"),
        turns=(10, "turns of a conversation"),
        tokens=(4000, "tokens of a conversation at its end"),
        disk=(
            False,
            "measure prefixes on disk instead: time to the first token of a new conversation, after"
            " a restart, and from memory; gaps of streams during saves",
        ),
    )


def _add_routing(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "routing beside a policy that knows the future, on simulated or real workers"
    parser = _kind(kinds, common, "routing", text, rounds=3, peers=False)
    _flags(
        parser,
        workers=(4, "workers of the model"),
        cache=(0, "tokens that a worker caches (32000; real: 12000)"),
        slow=(1.0, "factor by which one simulated worker is slower"),
        load=("", "run only this load, such as chats"),
        recorded=("", "file of a recorded load, instead of random loads"),
        real=(False, "use pools of real workers with the shape small"),
        rate=(4.0, "arrivals a second of loads on real workers"),
        count=(
            0,
            "chats, agents or calls of a load (its own number; real: 16 agents or 120 calls)",
        ),
    )


def _add_groups(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "speed of one model on several devices, beside replicas"
    parser = _kind(kinds, common, "groups", text, rounds=3, peers=False)
    _model(parser)
    _flags(
        parser,
        setup=(["1x1", "2x1", "1x2"], "pools to measure: workers x devices of each worker"),
        streams=([1, 32, 128], "streams at once"),
        prompt=(128, "tokens of a prompt"),
        tokens=(128, "tokens of a completion"),
        prefill=(4096, "tokens of a long prompt"),
        clients=(4, "processes that send"),
    )
    parser.add_argument(
        "--sequences",
        type=int,
        help="greatest number of requests that run at once in a worker (the number of streams)",
    )
    parser.add_argument(
        "--sums", choices=("auto", "nccl"), default="auto", help="the setting device_sums (auto)"
    )
    _add_work(parser, [])


def _add_speculation(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = _kind(
        kinds,
        common,
        "speculation",
        "tokens/s with drafts, beside tokens/s without drafts",
        peers=False,
    )
    _model(parser)
    parser.add_argument(
        "--speculation",
        choices=("off", "ngram", "mtp", "draft", "auto"),
        default="auto",
        help="source of drafts, like the setting of this name (auto); off: no drafts on either"
        " side, which shows how far equal batches differ",
    )
    _flags(
        parser,
        draft=("", "the draft model, like the setting of this name"),
        streams=([1, 8, 32, 128], "requests at once"),
        tokens=(128, "tokens that each request generates"),
        loads=(
            ["edits", "completions", "sampled"],
            "kinds of prompts: edits: a function of Python's library, and its beginning again under"
            " another name; completions: the beginning of a function; sampled: as completions, with"
            " temperature 1",
        ),
        processor=(False, CPU_TIME),
        acceptance=(
            0.0,
            "probability that a draft counts as right, so random weights show the gain of a shape",
        ),
    )


def _add_formats(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "tokens/s of a batch with formats, beside a batch without formats"
    parser = _kind(kinds, common, "formats", text, rounds=7, peers=False)
    _model(parser)
    _flags(
        parser,
        rows=([8, 32], "rows of a batch"),
        tokens=(96, "tokens of each row"),
        processor=(False, CPU_TIME),
    )


def _add_deaths(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "waits of streams after kills and stops of workers, ranks and brokers"
    parser = _kind(kinds, common, "deaths", text, rounds=3, peers=False)
    _flags(
        parser,
        model=(
            "builtin:counting",
            "reference of the model; another than the default has to count to 90",
        ),
        faults=(
            ["kill", "stop", "broker"],
            "kinds of faults: kill, stop: SIGKILL or SIGSTOP of each process of a worker while it"
            " reads prompts and while it decodes; broker: SIGKILL of the broker",
        ),
        streams=(8, "streams that run when a fault comes"),
        tokens=(400, "tokens of each stream"),
        replicas=(3, "workers of the model"),
        devices=(1, "devices of each worker; several are a group"),
        limit=(1.5, "the settings step_limit and prefill_limit in seconds"),
    )


def _add_checkpoint(kinds: Any, common: argparse.ArgumentParser) -> None:
    text = "write a model folder of a known shape with random weights"
    parser = kinds.add_parser("checkpoint", parents=[common], help=text)
    _shape(parser, required=True)
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a folder that does not exist yet"
    )
    parser.set_defaults(run=checkpoint)


def _add_report(kinds: Any, common: argparse.ArgumentParser) -> None:
    parser = kinds.add_parser("report", parents=[common], help="print the tables of saved figures")
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="JSON files that --out wrote"
    )
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
    _flags(parser, rounds=(rounds, "rounds of each measurement"))
    if peers:
        _flags(parser, no_peers=(False, "measure only mlxpool"))
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for figures as JSON, tables and pictures"
    )
    return parser


def _model(parser: argparse.ArgumentParser) -> Any:
    """Adds the flags that choose a model; returns their group, whose flags exclude each other."""
    model_flags = parser.add_mutually_exclusive_group()
    model_flags.add_argument(
        "--model", default="", metavar="PATH", help="the model: a folder or a reference"
    )
    _shape(parser, model_flags)
    return model_flags


def _shape(
    parser: argparse.ArgumentParser, model_flags: Any = None, *, required: bool = False
) -> None:
    text = "random weights of a known shape: small, llama-3.1-8b, …"
    (model_flags or parser).add_argument("--shape", default="", required=required, help=text)
    _flags(parser, layers=(0, "number of layers of the shape (all)"))
    parser.add_argument(
        "--quantise",
        default="",
        metavar="MODE",
        help="quantisation of the weights: affine, mxfp4, …",
    )


def _flags(parser: argparse.ArgumentParser, **flags: tuple[Any, str]) -> None:
    """Adds a flag for each keyword, whose value is the pair of the flag's default and help text.

    The flag's value has the type of the default; a flag with the default False takes no value. If
    the default is a list, the flag takes several values: of the type of the list's first value, or
    integers if the list is empty.
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
        raise ValueError(f"{options.folder} already exists; name a folder that does not exist")
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
    """Raises ValueError for a flag whose count is below 1, or whose number is below 0."""
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
