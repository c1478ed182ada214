"""Counts sentences that often need a second reading: nine patterns, see CONTRIBUTING.md.

Reads docstrings, comments, help texts and error texts of the Python files, and the pages. No number
of matches is an error, because a pattern also matches sentences that are clear.

Usage: plain_words.py [--list] [FOLDER OR FILE ...]
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = {
    "one that, those that": r"\b(?:ones?|those|that|all) (?:that|of which|(?:with )?which|whose)\b",
    "what is, what has, as a noun": r"(?<!\A)(?<![.?!:] )\bwhat"
    r" (?:is|are|has|have|was|it|they|a|an|the|he|each|its)\b",
    "where, for if": r"(?:^|(?<=[,;:.] ))[Ww]here (?!it is|they are)"
    r"|\b(?:is|are|one|that|True|False|None|0) where\b",
    "of which, behind which": r"\b(?:of|for|in|by|with|from|at|to|behind|beside|on)"
    r" (?:which|whom)\b",
    "behind, for after": r"\bbehind\b",
    "says, tells, of data": r"\b(?:says?|said|tells?|told)\b",
    "is no, are none": r"\b(?:is|are|was|were|has|have|gives?|takes?)"
    r" (?:no|none|neither)\b(?! longer)",
    "so many, so much": r"\b(?:so|as) (?:many|much|long|few)\b(?! as)",
    "a line without its noun": r"\A(?:Of|What|Whether|In|By|From|For|At|To|With|Beside|Behind|Those"
    r"|One|Where) ",
}
COMPILED = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
MIN_WORDS = 4  # the least number of words of a string constant that counts as a sentence
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")


class Text(NamedTuple):
    """A sentence, and the line at which it begins."""

    file: Path
    line: int
    sentence: str


def main() -> None:
    """Prints the number of matches of each pattern; with --list also each matching sentence."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="each sentence with its place")
    parser.add_argument("paths", nargs="*", type=Path)
    given = parser.parse_args()
    counts, total, marked = Counter[str](), 0, 0
    for text in sentences(given.paths or [ROOT]):
        total += 1
        matches = hits(text.sentence)
        counts.update(matches)
        marked += bool(matches)
        if given.list and matches:
            print(f"{text.file}:{text.line}: [{'; '.join(matches)}] {text.sentence}")
    for name in PATTERNS:
        print(f"{counts[name]:6} {name}")
    print(f"{marked} of {total} sentences have one of them")


def hits(sentence: str) -> list[str]:
    """Returns the names of the patterns that match a sentence; see PATTERNS."""
    return [name for name, pattern in COMPILED.items() if pattern.search(sentence)]


def sentences(paths: list[Path]) -> Iterator[Text]:
    """Yields all sentences of the tracked files under these paths."""
    names = subprocess.run(
        ["git", "ls-files", "--", *map(str, paths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in names:
        texts = {".py": of_python, ".md": of_page}.get(Path(name).suffix)
        if texts is None or name == "CHANGELOG.md":
            continue
        for line, text in texts((ROOT / name).read_text()):
            for sentence in SENTENCE.split(" ".join(text.split())):
                if len(sentence.split()) >= MIN_WORDS:
                    yield Text(Path(name), line, sentence)


def of_python(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and text of docstrings, comments and strings that are sentences."""
    inner: set[int] = set()  # constants inside f-strings, by id
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inner.update(id(part) for part in ast.walk(node))
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = "" if id(node) in inner else node.value
        else:
            continue
        for number, part in enumerate(re.split(r"\n\s*\n", text)):
            yield node.lineno + 2 * number, part
    yield from comments(source)


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and text of comments; consecutive comment lines are one text."""
    first, last, text = 0, 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, words = token.start[0], token.string.lstrip("#: ")
        if token.type != tokenize.COMMENT or words.startswith(("noqa", "type:", "fmt:", "pragma")):
            continue
        if line == last + 1:
            text += f"\n{words}"
        else:
            yield first, text
            first, text = line, words
        last = line
    yield first, text


def of_page(source: str) -> Iterator[tuple[int, str]]:
    """Yields the line and text of the paragraphs, items and table cells of a page."""
    fenced = False
    paragraph: list[str] = []
    begin = 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
            line = ""
        if fenced:
            continue
        new = re.match(r"\s*(?:[-*] |\d+\. |#|\|)", line)
        if paragraph and (new or not line.strip()):
            yield begin, " ".join(paragraph)
            paragraph = []
        if line.lstrip().startswith("|"):
            for cell in line.strip().strip("|").split("|"):
                yield number, cell.strip()
        elif line.strip():
            begin = begin if paragraph else number
            paragraph.append(re.sub(r"^\s*(?:[-*] |\d+\. |#+ )", "", line).strip())


if __name__ == "__main__":
    main()
