"""`mlxpool run`: completes one text, and prints the completion as it arrives."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from mlxpool.cli.formatting import json_text
from mlxpool.cli.printed_stream import (
    ChoicesOutput,
    figures_of,
    print_deltas,
    prompt_of,
    result_as_json,
)
from mlxpool.cli.request_flags import (
    add_connect_timeout,
    add_options,
    admin_target_of,
    check_broker,
    client_of,
    decode_utf8,
    options_of,
    shown_form,
    take_prompt,
)
from mlxpool.cli.style import NOTE, paint_of
from mlxpool.common.escapes import escape_line


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `run`."""
    run_parser = commands.add_parser(
        "run",
        parents=[common],
        help="complete a text, and print it as it is generated",
        description="Completes a text from an argument or from standard input.",
    )
    run_parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    run_parser.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="the text to complete (default, or -: standard input)",
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
        help="an image file to put before the prompt, or at its [img-n]; may be repeated",
    )
    run_parser.add_argument(
        "-n",
        "--choices",
        dest="n",
        type=int,
        metavar="N",
        help="number of choices, with seed, seed + 1, … (1 to 64)",
    )
    run_parser.add_argument(
        "--echo", action="store_true", default=None, help="print the prompt first"
    )
    run_parser.add_argument(
        "--prompt-logprobs",
        type=int,
        metavar="N",
        help="report the prompt's tokens with N alternatives each, with --json; --max-tokens 0"
        " leaves out the completion",
    )
    add_options(run_parser)
    add_connect_timeout(run_parser)
    run_parser.add_argument(
        "--quiet", action="store_true", help="print no figures on standard error"
    )
    run_parser.set_defaults(run=run, take_rest=take_prompt)


def run(options: argparse.Namespace) -> int:
    """Prints the completion to standard output, and the figures to standard error."""
    # Imported here, so that other commands start faster.
    from mlxpool.cli.load_progress import LoadProgress

    settings = options_of(options)
    check_broker(options)  # fails before the user types a prompt
    prompt = options.prompt
    if prompt in (None, "-"):
        prompt = decode_utf8(sys.stdin.buffer.read())
    prompt_arguments = prompt_of(prompt, options.image, chat=options.chat)
    form = shown_form(options)
    started = time.monotonic()
    choices = 1 if options.n is None else options.n
    output = ChoicesOutput(choices, lambda text: print(form(text), end="", flush=True))
    with (
        client_of(options) as client,
        client.stream_choices(options.model, n=choices, **prompt_arguments, **settings) as stream,
        LoadProgress(admin_target_of(options), options.model) as progress,
    ):
        first = print_deltas(
            stream, output.add, as_json=options.json, choices=choices, on_first=progress.close
        )
        results = stream.result
    if options.json:
        for result in results:
            print(json_text(result_as_json(result, choices)), flush=True)
    else:
        output.end()
        print()
        if not options.quiet:
            now = time.monotonic()
            line = escape_line(figures_of(results, now - started, now - first))
            for note in filter(None, [line, escape_line(progress.slow_blas)]):
                print(paint_of(sys.stderr)(note, NOTE), file=sys.stderr)
    # The code is 1 if another client cancelled the request, because the text is incomplete.
    return int(any(result.reason == "cancelled" for result in results))
