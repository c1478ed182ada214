"""Find the functions of Python files that fit a description, by their vectors.

    python examples/retrieval.py FOLDER "remove a worker from the pool" [--run-dir DIR] [--top 5]

Embeds the description and the code of every function below FOLDER, with the built-in model
`demo-embed` or the model of --model. Prints the nearest functions with their cosine. A program that
searches often keeps the vectors; here they are computed at each run.

Exit code 0: something was found; 1: FOLDER has no functions, or the pool failed.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlxpool.client import Client, PoolError


class Function(NamedTuple):
    """A function, its location, and its source text without docstring."""

    place: str
    source: str


def functions(folder: Path) -> Iterator[Function]:
    """Yields the functions of all Python files below a folder; omits files that are not valid."""
    for file in sorted(folder.rglob("*.py")):
        try:
            tree = ast.parse(file.read_text("utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{file.relative_to(folder)}:{node.lineno} {node.name}"
                yield Function(place, source_of(node))


def source_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Returns the source of a function without its docstring and comments."""
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(node)


def cosines(query: list[float], rows: list[list[float]]) -> list[float]:
    """Returns the cosine of each row with the query; all vectors have the length 1."""
    return [sum(a * b for a, b in zip(query, row, strict=True)) for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("description")
    parser.add_argument("--run-dir", type=Path, help="the broker's (default: the usual one)")
    parser.add_argument("--model", default="demo-embed")
    parser.add_argument("--top", type=int, default=5)
    options = parser.parse_args()
    all_functions = list(functions(options.folder))
    if not all_functions:
        print(f"there are no functions below {options.folder}", file=sys.stderr)
        return 1
    sources = [function.source for function in all_functions]
    try:
        with Client(options.run_dir) as client:
            rows = client.embed(options.model, sources, truncate=True, normalise=True)
            (query,) = client.embed(options.model, options.description, normalise=True)
    except PoolError as error:
        print(f"{error.code}: {error.message}", file=sys.stderr)
        return 1
    near = sorted(zip(cosines(query, rows.tolist()), all_functions, strict=True), reverse=True)
    for cosine, function in near[: options.top]:
        print(f"{cosine:.3f} {function.place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
