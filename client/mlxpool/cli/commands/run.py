"""`mlxpool run`: complete one text, printed as it comes."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxpool.cli.choices_output import ChoicesOutput
from mlxpool.cli.figures import figures_of
from mlxpool.cli.json_text import json_text
from mlxpool.cli.request_flags import (
    add_connect_timeout,
    add_options,
    admin_target_of,
    check_broker,
    client_of,
    decode_utf8,
    options_of,
    shown_form,
)
from mlxpool.cli.style import NOTE, paint_of
from mlxpool.common.escapes import escape_line
from mlxpool.common.protocol.images import images_of_text

if TYPE_CHECKING:
    from mlxpool.client import Delta, Result


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `run`."""
    run_parser = commands.add_parser(
        "run",
        parents=[common],
        help="complete a text, printed as it is generated",
        description="Completes a text that is an argument or standard input.",
    )
    run_parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    run_parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help="default, or -: standard input"
    )
    run_parser.add_argument(
        "--chat", action="store_true", help="send the prompt as a user's message"
    )
    run_parser.add_argument(
        "--image",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="an image in front of the prompt, or where it has [img-n]; may be repeated",
    )
    run_parser.add_argument(
        "-n",
        "--choices",
        dest="n",
        type=int,
        metavar="N",
        help="so many choices, with seed, seed + 1, … (1 to 64)",
    )
    run_parser.add_argument(
        "--echo", action="store_true", default=None, help="print the prompt first"
    )
    run_parser.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="N",
        help="report the prompt's tokens with so many alternatives, with --json; without"
        " completion for --max-tokens 0",
    )
    add_options(run_parser)
    add_connect_timeout(run_parser)
    run_parser.add_argument("--quiet", action="store_true", help="no figures on standard error")
    run_parser.set_defaults(run=run, take_rest=take_prompt)


def take_prompt(options: argparse.Namespace, rest: list[str]) -> bool:
    """Take the prompt from the arguments that argparse left over; returns whether it could.

    In `run MODEL --chat PROMPT` the argparse of Python 3.11 takes the prompt for absent at MODEL.
    """
    missing = options.prompt is None and len(rest) == 1
    if not missing or (rest[0].startswith("-") and rest[0] != "-"):
        return False
    options.prompt = rest[0]
    return True


def run(options: argparse.Namespace) -> int:
    """Print the completion to standard output, the figures to standard error."""
    # Here and not above: the other commands start faster without.
    from mlxpool.cli.load_progress import LoadProgress

    given = options_of(options)
    check_broker(options)  # before a prompt is typed
    prompt = options.prompt
    if prompt in (None, "-"):
        prompt = decode_utf8(sys.stdin.buffer.read())
    prompt_arguments = _prompt(prompt, options.image, chat=options.chat)
    form = shown_form(options)
    started = time.monotonic()
    choices = 1 if options.n is None else options.n
    output = ChoicesOutput(choices, lambda text: print(form(text), end="", flush=True))
    with (
        client_of(options) as client,
        client.stream(options.model, n=choices, **prompt_arguments, **given) as stream,
        LoadProgress(admin_target_of(options), options.model) as progress,
    ):
        shown, first = False, 0.0
        try:
            for delta in stream:
                first = first or time.monotonic()
                progress.close()
                if options.json:
                    print(json_text(_delta_as_json(delta, choices)), flush=True)
                else:
                    output.add(delta)
                shown = True
        except BaseException:
            if shown and not options.json:
                print()  # ends the line of text
            raise
        results = stream.result
    if options.json:
        for result in results:
            print(json_text(as_json(result, choices)), flush=True)
    else:
        output.end()
        print()
        if not options.quiet:
            now = time.monotonic()
            line = escape_line(figures_of(results, now - started, now - first))
            print(paint_of(sys.stderr)(line, NOTE), file=sys.stderr)
    # Cancelled by another client: the text is not complete.
    return int(any(result.reason == "cancelled" for result in results))


def _prompt(text: str, images: Sequence[Path], *, chat: bool) -> dict[str, Any]:
    """The prompt arguments of `stream`; images that a text does not name stand in front of it."""
    if chat:
        parts = [{"type": "image", "image": file} for file in images]
        content = [*parts, {"type": "text", "text": text}] if images else text
        return {"messages": [{"role": "user", "content": content}]}
    named = set(images_of_text(text))
    tags = [f"[img-{number}]" for number in range(len(images)) if number not in named]
    return {"prompt": "".join(tags) + text, "images": images}


def _delta_as_json(delta: Delta, choices: int) -> dict[str, Any]:
    line: dict[str, Any] = {"text": delta.text, "ids": delta.ids, "pos": delta.pos}
    if choices > 1:
        line["index"] = delta.index
    if delta.prompt:
        line["prompt"] = delta.prompt
    if delta.logprobs:
        line["logprobs"] = delta.logprobs
    return line


def as_json(result: Result, choices: int = 1) -> dict[str, Any]:
    """The last line of `run --json`, one for each choice."""
    return {
        **({"index": result.index} if choices > 1 else {}),
        "done": True,
        "reason": result.reason,
        "text": result.text,
        "ids": result.ids,
        "usage": result.usage,
        "timings_ms": result.timings_ms,
        "seed": result.seed,
        "attempts": result.attempts,
        **({} if result.complete is None else {"complete": result.complete}),
    }
