"""`mlxpool embed`, `rerank` and `classify`: answers of encoder models to arguments or stdin."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mlxpool.cli.formatting import count, json_text, table
from mlxpool.cli.request_flags import add_connect_timeout, client_of, decode_utf8, seconds
from mlxpool.common.escapes import escape_line

TEXTS_HELP = "texts; without texts, or with -, the lines of standard input"


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds `embed`, `rerank` and `classify`."""
    embed = _add(commands, common, "embed", "print a vector for each text")
    embed.add_argument("texts", metavar="TEXT", nargs="*", help=TEXTS_HELP)
    embed.add_argument(
        "--dimensions", type=count, help="number of dimensions that each vector keeps"
    )
    embed.add_argument(
        "--normalise",
        action=argparse.BooleanOptionalAction,
        help="scale vectors to the length 1 (default: as set for the model)",
    )
    embed.add_argument(
        "--prompt-name", metavar="NAME", help="put this prompt of the model before each text"
    )
    embed.set_defaults(run=run_embed)
    rerank = _add(commands, common, "rerank", "order documents by how well they fit a query")
    rerank.add_argument("query", metavar="QUERY", help="text with which documents are compared")
    rerank.add_argument("texts", metavar="DOCUMENT", nargs="*", help=TEXTS_HELP)
    rerank.add_argument("--top", type=count, metavar="N", help="print only the N best documents")
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
        "--truncate", action="store_true", help="cut texts that are too long, instead of failing"
    )
    parser.add_argument(
        "--deadline", type=seconds, metavar="SECONDS", help="give up after this time"
    )
    add_connect_timeout(parser)
    return parser


def run_embed(options: argparse.Namespace) -> int:
    """Prints the vector of each text as a line of JSON; with --json one object for all texts."""
    with client_of(options) as client:
        vectors = client.embed(
            options.model,
            _texts(options),
            dimensions=options.dimensions,
            normalise=options.normalise,
            prompt_name=options.prompt_name,
            **_settings(options),
        )
    if options.json:
        print(json_text({"vectors": vectors.tolist(), "usage": vectors.usage}))
    else:
        for row in vectors:
            print(json_text(row))
    return 0


def run_rerank(options: argparse.Namespace) -> int:
    """Prints the documents, best first, with their scores."""
    texts = _texts(options)
    with client_of(options) as client:
        ranking = client.rerank(
            options.model, options.query, texts, top=options.top, **_settings(options)
        )
    if options.json:
        results = [{"index": item.index, "score": item.score} for item in ranking]
        print(json_text({"results": results}))
    else:
        rows = [(f"{item.score:.4f}", str(item.index), texts[item.index]) for item in ranking]
        print("\n".join(table([("score", "index", "document"), *rows])))
    return 0


def run_classify(options: argparse.Namespace) -> int:
    """Prints the labels of each text with their probabilities, the most probable first."""
    texts = _texts(options)
    with client_of(options) as client:
        classified = client.classify(options.model, texts, **_settings(options))
    if options.json:
        print(json_text({"labels": classified.labels, "probabilities": classified.tolist()}))
        return 0
    for text, row in zip(texts, classified, strict=True):
        best = sorted(zip(row, classified.labels, strict=True), reverse=True)
        shares = ", ".join(f"{label} {share:.3f}" for share, label in best)
        print(escape_line(f"{shares}: {text}"))
    return 0


def _texts(options: argparse.Namespace) -> Sequence[str]:
    """Returns the texts in arguments or in standard input. Raises ValueError if there are none."""
    texts: list[str] = options.texts
    if texts and texts != ["-"]:
        return texts
    lines = decode_utf8(sys.stdin.buffer.read()).splitlines()
    texts = [line for line in lines if line]
    if not texts:
        raise ValueError("there is no text: give one as an argument, or lines on standard input")
    return texts


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    deadline = options.deadline
    return {
        "truncate": options.truncate or None,
        "deadline_ms": None if deadline is None else max(1, round(deadline * 1000)),
    }
