"""`mlxpool run`: complete one text, printed as it comes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlxpool.cli.target import Place, place_of
from mlxpool.common.options import MAX_DEADLINE_MS

if TYPE_CHECKING:
    from mlxpool.client import Client, Delta, Result

BROKER_GRACE = 10.0  # seconds; somebody sits before the screen and waits

FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "max_tokens": (int, "tokens to generate at most (default, 0 or below: up to the context)"),
    "temperature": (float, "0 is greedy (default 0.8)"),
    "top_p": (float, "keep the most likely tokens of this mass (default 0.9)"),
    "top_k": (int, "keep this many of the most likely tokens, 0: all (default 40)"),
    "min_p": (float, "drop tokens this much less likely than the first (default 0)"),
    "repeat_penalty": (float, "divide the logits of recent tokens (default 1, off)"),
    "repeat_last_n": (int, "how many tokens are recent, -1: all (default 64)"),
    "presence_penalty": (float, "subtract from recent tokens once (default 0)"),
    "frequency_penalty": (float, "subtract from recent tokens for each time (default 0)"),
    "seed": (int, "for the same text again (default: drawn)"),
    "top_logprobs": (int, "alternatives reported with --json (default 0)"),
}


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """`run`."""
    run_parser = commands.add_parser(
        "run", parents=[common], help="complete a text, from the arguments or standard input"
    )
    run_parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    run_parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="default, or -: standard input"
    )
    run_parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message"
    )
    add_options(run_parser)
    run_parser.add_argument("--quiet", action="store_true", help="no figures on standard error")
    run_parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What is drawn, and when it ends: `run` and `chat` have the same."""
    for name, (kind, text) in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    parser.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--logprobs", action="store_true", default=None, help="report each token's, with --json"
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", default=None, help="go on past the model's own end"
    )
    parser.add_argument(
        "--deadline", type=_seconds, metavar="SECONDS", help="give up after this time"
    )


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate` that were given."""
    from mlxpool.common.options import CHECKS

    asked = {name: getattr(options, name) for name in CHECKS if hasattr(options, name)}
    if options.deadline is not None:
        asked["deadline_ms"] = max(1, round(options.deadline * 1000))
    if options.top_logprobs:
        asked["logprobs"] = True
    return asked


def take_prompt(options: argparse.Namespace, rest: list[str]) -> bool:
    """Whether what argparse has left over is the prompt; it is taken then.

    In `run MODEL --chat PROMPT` the argparse of Python 3.11 takes the prompt for absent at MODEL.
    """
    mine = options.command == "run" and options.prompt is None and len(rest) == 1
    if not mine or (rest[0].startswith("-") and rest[0] != "-"):
        return False
    options.prompt = rest[0]
    return True


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_DEADLINE_MS / 1000:
        most = MAX_DEADLINE_MS // 1000
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {most}, got {text}")
    return value


def run(options: argparse.Namespace) -> int:
    """Print the completion to standard output, the figures to standard error."""
    # Here and not above: the other commands start faster without.
    from mlxpool.cli.load_progress import Waiting
    from mlxpool.client import Client

    prompt = _standard_input() if options.prompt in (None, "-") else options.prompt
    asked = asked_of(options)
    messages = [{"role": "user", "content": prompt}] if options.chat else None
    show = _print_json if options.json else _print_text
    started = time.monotonic()
    with (
        client_of(options, Client) as client,
        client.stream(
            options.model, None if options.chat else prompt, messages=messages, **asked
        ) as stream,
        Waiting(admin_of(options), options.model) as waiting,
    ):
        shown, first = False, 0.0
        try:
            for delta in stream:
                first = first or time.monotonic()
                waiting.close()
                show(delta)
                shown = True
        except BaseException:
            if shown and not options.json:
                print()  # what follows must not stick to the text
            raise
        result = stream.result
    if options.json:
        print(json.dumps(as_json(result)), flush=True)
    else:
        print()
        if not options.quiet:
            print(
                figures(result, time.monotonic() - started, time.monotonic() - first),
                file=sys.stderr,
            )
    return int(result.reason == "cancelled")  # by somebody else: the text is not whole


def admin_of(options: argparse.Namespace) -> Place | None:
    """Where to ask how far a load is; None where the flags name the front of a broker elsewhere."""
    return None if getattr(options, "endpoint", None) else options.place


def client_of(options: argparse.Namespace, kind: type[Client]) -> Client:
    """A client of the broker that the flags name."""
    place = place_of(options, "front")
    return kind(
        place.run_dir,
        place.endpoint,
        server_key=place.server_key,
        key=place.key,
        broker_grace=BROKER_GRACE,
    )


def _standard_input() -> str:
    return as_utf8(sys.stdin.buffer.read())


def as_utf8(read: bytes) -> str:
    """What standard input said. Raises ValueError for what is no text."""
    try:
        return read.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not UTF-8: {error}") from None


def _print_text(delta: Delta) -> None:
    print(delta.text, end="", flush=True)


def _print_json(delta: Delta) -> None:
    line: dict[str, Any] = {"text": delta.text, "ids": delta.ids, "pos": delta.pos}
    if delta.logprobs:
        line["logprobs"] = delta.logprobs
    print(json.dumps(line), flush=True)


def as_json(result: Result) -> dict[str, Any]:
    """The last line of `run --json`."""
    return {
        "done": True,
        "reason": result.reason,
        "text": result.text,
        "ids": result.ids,
        "usage": result.usage,
        "timings_ms": result.timings_ms,
        "seed": result.seed,
        "attempts": result.attempts,
    }


def figures(result: Result, seconds: float, streamed: float) -> str:
    """One line about a finished completion, `streamed` seconds of it since its first token.

    A worker knows the time of what it made itself, which is less after a loss.
    """
    made = result.usage.get("completion_tokens", 0)
    decode = max(streamed, result.timings_ms.get("decode", 0.0) / 1000)
    rate = f"{made / decode:.0f} tokens/s, " if decode and made > 1 else ""
    prompt = result.usage.get("prompt_tokens", 0)
    cached = result.usage.get("cached_tokens", 0)
    return (
        f"[{made} tokens, {rate}prompt {prompt} ({cached} cached), {seconds:.2f} s,"
        f" ended: {result.reason}, seed {result.seed}]"
    )
