"""`mlxpool embed`, `rerank` and `classify`: what encoder models answer, from arguments or stdin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mlxpool.cli.formatting import count, json_text, table
from mlxpool.cli.request_flags import add_connect_timeout, client_of, decode_utf8, seconds
from mlxpool.common.escapes import escape_line

TEXTS_HELP = "texts; none, or -: the lines of standard input"


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add `embed`, `rerank` and `classify`."""
    embed = _add(commands, common, "embed", "print a vector for each text")
    embed.add_argument("texts", metavar="TEXT", nargs="*", help=TEXTS_HELP)
    embed.add_argument("--dimensions", type=count, help="keep so many numbers of a vector")
    embed.add_argument(
        "--normalise",
        action=argparse.BooleanOptionalAction,
        help="whether vectors have the length 1 (default: as the model has it)",
    )
    embed.add_argument(
        "--prompt-name", metavar="NAME", help="put this prompt of the model before each text"
    )
    embed.set_defaults(run=run_embed)
    rerank = _add(commands, common, "rerank", "order documents by how well they fit a query")
    rerank.add_argument("query", metavar="QUERY")
    rerank.add_argument("texts", metavar="DOCUMENT", nargs="*", help=TEXTS_HELP)
    rerank.add_argument("--top", type=count, metavar="N", help="print the best N only")
    rerank.set_defaults(run=run_rerank)
    classify = _add(commands, common, "classify", "print the probability of each label of a text")
    classify.add_argument("texts", metavar="TEXT", nargs="*", help=TEXTS_HELP)
    classify.set_defaults(run=run_classify)


def _add(
    commands: Any, common: argparse.ArgumentParser, name: str, text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, parents=[common], help=text)
    parser.add_argument("model", metavar="MODEL", help="a name that `mlxpool models` shows")
    parser.add_argument(
        "--truncate", action="store_true", help="cut texts that are too long; otherwise an error"
    )
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="give up after this time"
    )
    add_connect_timeout(parser)
    return parser


def run_embed(options: argparse.Namespace) -> int:
    """Print a line of JSON for each text: its vector; with --json one object for all."""
    with client_of(options) as client:
        found = client.embed(
            options.model,
            _texts(options),
            dimensions=options.dimensions,
            normalise=options.normalise,
            prompt_name=options.prompt_name,
            **_settings(options),
        )
    if options.json:
        print(json_text({"vectors": found.tolist(), "usage": found.usage}))
    else:
        for row in found:
            print(json_text(row))
    return 0


def run_rerank(options: argparse.Namespace) -> int:
    """Print the documents, best first, with their scores."""
    texts = _texts(options)
    with client_of(options) as client:
        found = client.rerank(
            options.model, options.query, texts, top=options.top, **_settings(options)
        )
    if options.json:
        results = [{"index": one.index, "score": one.score} for one in found]
        print(json_text({"results": results}))
    else:
        rows = [(f"{one.score:.4f}", str(one.index), texts[one.index]) for one in found]
        print("\n".join(table([("score", "index", "document"), *rows])))
    return 0


def run_classify(options: argparse.Namespace) -> int:
    """Print the labels of each text with their probabilities, the most probable first."""
    texts = _texts(options)
    with client_of(options) as client:
        found = client.classify(options.model, texts, **_settings(options))
    if options.json:
        print(json_text({"labels": found.labels, "probabilities": found.tolist()}))
        return 0
    for text, row in zip(texts, found, strict=True):
        best = sorted(zip(row, found.labels, strict=True), reverse=True)
        shares = ", ".join(f"{label} {share:.3f}" for share, label in best)
        print(escape_line(f"{shares}: {text}"))
    return 0


def _texts(options: argparse.Namespace) -> Sequence[str]:
    """The texts of the arguments. Raises ValueError where standard input has none."""
    texts: list[str] = options.texts
    if texts and texts != ["-"]:
        return texts
    lines = decode_utf8(sys.stdin.buffer.read()).splitlines()
    found = [line for line in lines if line]
    if not found:
        raise ValueError("there is no text: give one as an argument, or lines on standard input")
    return found


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    deadline = options.deadline
    return {
        "truncate": options.truncate or None,
        "deadline_ms": None if deadline is None else max(1, round(deadline * 1000)),
    }
