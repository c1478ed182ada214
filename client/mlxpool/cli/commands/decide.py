"""`mlxpool decide`: the probabilities of the possible answers to questions about a text."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mlxpool.cli.formatting import json_text
from mlxpool.cli.request_flags import add_connect_timeout, client_of, decode_utf8, seconds
from mlxpool.common.escapes import escape_line

if TYPE_CHECKING:
    from mlxpool.client import Decision

SHOWN = 5  # the most labels in one line


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `decide`."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "decide", parents=[common], help="print the probabilities of given answers to questions"
    )
    parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    parser.add_argument("prompt", metavar="TEXT", help="the text to decide on; -: standard input")
    parser.add_argument(
        "questions",
        metavar="QUESTION",
        nargs="*",
        help="questions about the text; without any, the text itself ends with a question",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument(
        "--choice",
        action="append",
        metavar="LABEL",
        help="a possible answer; give several (default: yes or no)",
    )
    kinds.add_argument(
        "--scale", type=scale, metavar="LOW-HIGH", help="answer with a whole number, such as 1-10"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="above 1 it flattens the probabilities, below 1 it sharpens them (default 1)",
    )
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="give up after this time"
    )
    add_connect_timeout(parser)
    parser.set_defaults(run=run)


def scale(text: str) -> range:
    """Returns the numbers of a scale. Raises ArgumentTypeError if the text is not LOW-HIGH."""
    low, _, high = text.partition("-")
    if not low.isdecimal() or not high.isdecimal() or int(low) >= int(high):
        raise argparse.ArgumentTypeError(f"must be two numbers such as 1-10, got {text}")
    return range(int(low), int(high) + 1)


def run(options: argparse.Namespace) -> int:
    """Prints a line for each question: its labels and probabilities, the most probable first."""
    prompt = options.prompt
    if prompt == "-":
        prompt = decode_utf8(sys.stdin.buffer.read())
    choices = options.choice or options.scale
    deadline = options.deadline
    with client_of(options) as client:
        decisions = client.decide_all(
            options.model,
            prompt,
            [(question, choices) for question in options.questions or [""]],
            temperature=options.temperature,
            deadline_ms=None if deadline is None else max(1, round(deadline * 1000)),
        )
    if options.json:
        rows = [
            {
                "answer": _shown(decision.answer),
                "labels": [_shown(label) for label in decision.probabilities],
                "probabilities": list(decision.probabilities.values()),
                "outside": decision.outside,
            }
            for decision in decisions
        ]
        print(json_text({"decisions": rows, "usage": decisions.usage}))
        return 0
    for question, decision in zip(options.questions or [""], decisions, strict=True):
        print(escape_line(f"{_line(decision)}{question and ': '}{question}"))
    return 0


def _line(decision: Decision) -> str:
    best = sorted(decision.probabilities.items(), key=lambda item: -item[1])
    shares = [f"{_shown(label)} {share:.3f}" for label, share in best[:SHOWN]]
    return ", ".join([*shares, f"outside {decision.outside:.3f}"])


def _shown(label: object) -> str:
    return {True: "yes", False: "no"}[label] if isinstance(label, bool) else str(label)
