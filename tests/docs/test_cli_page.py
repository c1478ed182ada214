"""docs/cli.md, docs/bench.md: every command with its options, and the form of its JSON."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.cli.main import parser
from support.command_lines import options, verbs
from support.disk_records import records_of, tier_at, write_all
from support.json_shapes import faults, named_shapes, parsed, sections_of, shapes_of
from support.model_hub import Repository, running_hub
from support.pool import PATIENCE, Pool
from worker.encoders.checkpoints import CASES, write

DOCS = Path(__file__).parents[2] / "docs"
PAGE, BENCH = ((DOCS / name).read_text("utf-8") for name in ("cli.md", "bench.md"))
SECTIONS = sections_of(PAGE) | sections_of(BENCH)
NAMED = named_shapes(PAGE)
OF_ALL = (
    "--help", "-h", "--run-dir", "--json", "--version", "-V", "--endpoint", "--server-key", "--key"
)  # fmt: skip


def commands(above: argparse.ArgumentParser, words: str = "mlxpool") -> dict[str, Any]:
    """Returns every command of the command line, with its parser."""
    parsers: dict[str, Any] = {}
    for name, inner in verbs(above).items():
        parsers |= commands(inner, f"{words} {name}")
    return parsers or {words: above}


COMMANDS = commands(parser())


OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*)")
LIST_OF = re.compile(r"the options of `([\w ]+)`(?: but ((?:`--[\w-]+`(?:,\s)?)+))?")


def options_of(name: str) -> set[str]:
    """Returns the long options of a command, except those that every command has."""
    own = {text for action in options(COMMANDS[name]) for text in action.option_strings}
    return {text for text in own if text.startswith("--")} - set(OF_ALL)


def commands_of(cell: str, above: str) -> set[str]:
    """Returns the commands that a table's cell names; `config` stands for all its subcommands.

    For a cell with "all but", returns the other commands. `above` is the beginning of all names.
    """
    named = {f"{above} {word}" for word in re.findall(r"`([\w -]+)`", cell)}
    matched = {name for name in COMMANDS if name in named or name.rpartition(" ")[0] in named}
    assert all(any(f"{name} ".startswith(f"{prefix} ") for name in matched) for prefix in named), (
        cell
    )
    return {n for n in COMMANDS if n.startswith(above)} - matched if "all but" in cell else matched


def shared_options() -> dict[str, set[str]]:
    """Returns, for each command, the options that the two tables of shared options give it."""
    flags: dict[str, set[str]] = {name: set() for name in COMMANDS}
    first = BENCH.partition("\n## ")[0]
    for text, above in ((SECTIONS["Shared options"], "mlxpool"), (first, "mlxpool bench")):
        for row in re.findall(r"^\| (`--.*?) \| (.*?) \| ", text, re.M):
            for name in commands_of(row[1], above):
                assert not flags[name] & set(OPTION.findall(row[0])), (name, row)
                flags[name] |= set(OPTION.findall(row[0]))
    return flags


SHARED = shared_options()


def told_options(name: str) -> set[str]:
    """Returns a command's options according to the page.

    The options are those in the command's section, in sections to which it refers, and in the
    tables of shared options. Options that all commands have are left out.
    """
    text = SECTIONS[name]
    flags = set(OPTION.findall(LIST_OF.sub("", text))) | SHARED[name]
    for other, without in LIST_OF.findall(text):
        flags |= told_options(f"mlxpool {other}") - set(OPTION.findall(without))
    return flags - set(OF_ALL)


def test_the_sections_are_the_commands() -> None:
    assert {name for name in SECTIONS if name.startswith("mlxpool ")} == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_options_of_each_section_are_those_of_the_command(name: str) -> None:
    assert told_options(name) == options_of(name)


# ---- JSON ----------------------------------------------------------------------------------------

CONFIG = f"""
[keys.gone]
role = "client"
public = "{"a" * 40}"

[models.broken]
path = "/nowhere/at/all"

[models.slow]
path = "builtin:counting"
counting.step_us = 20000
"""
# Commands whose JSON is not tested here: servers print nothing, tests/bench checks the output of
# `bench`, and `ray` needs a cluster.
SERVING = {f"mlxpool {name}" for name in ("serve", "broker", "worker", "gateway")}
NO_JSON = {*SERVING, "mlxpool help", *(n for n in COMMANDS if " bench " in n or " ray " in n)}
# The order matters, because a command changes the output of later ones. ID is a live request's id.
TRIED: tuple[tuple[str, ...], ...] = (
    ("load", "counting", "--wait"),
    ("embed", "embed", "a dog"),
    ("rerank", "rerank", "a dog", "a fox"),
    ("classify", "classify", "a dog"),
    ("decide", "demo", "a dog", "Is it?"),
    ("run", "counting", "hello", "--max-tokens", "3", "--logprobs"),
    ("run", "counting", "hello", "--max-tokens", "3"),
    ("run", "counting", "hello", "--max-tokens", "3", "--seed", str(2**64 - 1)),
    ("submit", "counting", "hello", "--max-tokens", "3", "--key", "job"),
    ("submit", "counting", "hello", "--delay", "1h", "--seed", str(2**64 - 1), "--key", "later"),
    ("fetch", "job"),
    ("jobs",),
    ("jobs", "job"),
    ("submit", "--batch", "-", "counting", "--allow-bad-lines", "--key", "lines"),
    ("fetch", "--batch", "lines"),
    ("jobs", "--batch", "lines"),
    ("retry", "later"),
    ("release", "job"),
    ("chat", "counting", "--max-tokens", "3"),
    ("chat", "nobody"),
    ("ps",),
    ("top", "--count", "2"),
    ("stats",),
    ("stats", "--watch", "--count", "1"),
    ("logs",),
    ("models",),
    ("pull", "org/small"),
    ("check", "demo"),
    ("check", "counting"),
    ("check", "broken"),
    ("requests",),
    ("restart", "counting/0"),
    ("cancel", "ID"),
    ("drain", "counting"),
    ("unload", "slow"),
    ("config", "show"),
    ("config", "check"),
    ("prefix", "ls", "--prefix-dir", "PREFIXES"),
    ("prefix", "verify", "--prefix-dir", "PREFIXES"),
    ("prefix", "rm", "m", "--prefix-dir", "PREFIXES"),
    ("completion", "bash"),
    ("version",),
    ("keygen", "somebody", "--role", "client", "--folder", "KEYS"),
    ("revoke", "gone"),
    ("reload",),
    ("ps",),
    ("stop",),
)


def encoders(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Writes three small encoder models; returns their config sections (TOML)."""
    root = tmp_path_factory.mktemp("models")
    cases = {"embed": "bert", "rerank": "bert, rerank", "classify": "bert, classify"}
    return "".join(
        f'[models.{name}]\npath = "{write(root / name, CASES[case])}"\n'
        for name, case in cases.items()
    )


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Any]]]:
    """Returns the output of each command, by its name."""
    outputs: dict[str, list[Any]] = {}
    state_dir = ("--state-dir", str(tmp_path_factory.mktemp("jobs")))
    config = CONFIG + encoders(tmp_path_factory)
    prefixes = tmp_path_factory.mktemp("prefixes")
    with tier_at(prefixes) as tier:
        write_all(tier, records_of(range(300), states=[300]))
    with (
        Pool(tmp_path_factory.mktemp("pool"), config, arguments=state_dir) as pool,
        pool.client() as client,
        client.stream("slow", "x") as stream,
        running_hub() as hub,
    ):
        hub.repositories["org/small"] = Repository({"x.gguf": b"x"})
        cache = str(tmp_path_factory.mktemp("hub"))
        pool.environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": cache}
        pool.environment["MLXPOOL_CONFIG"] = str(pool.config)
        deltas = iter(stream)
        next(deltas)
        for words in TRIED:
            keys = str(pool.run_dir / "keys")
            replacements = {"ID": stream.id.hex(), "KEYS": keys, "PREFIXES": str(prefixes)}
            arguments = [replacements.get(word, word) for word in words]
            done = pool.cli(*arguments, "--json", stdin="hello\n")
            name = next(n for n in COMMANDS if f"mlxpool {' '.join(words)} ".startswith(f"{n} "))
            outputs.setdefault(name, []).extend(map(json.loads, done.stdout.splitlines()))
        stream.close()
        assert pool.process is not None
        pool.process.wait(timeout=PATIENCE)
        pool.process = None
    yield outputs


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - NO_JSON))
def test_json_has_the_shape_that_the_page_gives(name: str, answers: dict[str, list[Any]]) -> None:
    known = shapes_of(SECTIONS[name], NAMED)
    assert known and answers[name]
    for value in answers[name]:
        wrong = sorted((list(faults(value, shape)) for shape in known), key=len)
        assert not wrong[0], "\n".join(wrong[0])
    for shape in known:
        assert any(not list(faults(value, shape)) for value in answers[name]), shape


def integers(value: Any) -> Iterator[int]:
    """Yields every integer within a value of JSON."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from integers(item)
    elif isinstance(value, int):
        yield value


def test_every_integer_is_one_that_doubles_keep(answers: dict[str, list[Any]]) -> None:
    numbers = [number for values in answers.values() for number in integers(values)]
    assert len(numbers) > 100
    assert max(map(abs, numbers)) < 2**53


def test_an_error_has_the_shape_that_the_page_gives(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        done = pool.cli("run", "nobody", "x", "--json")
    assert list(faults(json.loads(done.stdout), NAMED["ERROR"])) == []


@pytest.mark.parametrize(
    ("value", "shape", "count"),
    [
        ({"a": 1}, {"a": "integer"}, 0),
        ({"a": True}, {"a": "integer"}, 1),
        ({"a": 1.5}, {"a": "integer"}, 1),
        ({"a": 1}, {"a": "number"}, 0),
        ({"a": None}, {"a": "string"}, 1),
        ({"a": None}, {"a": "string or null"}, 0),
        ({}, {"a": "string"}, 1),
        ({}, {"a?": "string"}, 0),
        ({"b": 1}, {"a?": "string"}, 1),
        ({"b": "x"}, {"*": "integer"}, 1),
        ([1, "x"], ["integer"], 1),
        ({}, ["any"], 1),
        ("x", {"a": "any"}, 1),
    ],
)
def test_values_that_do_not_fit_a_shape_are_found(value: Any, shape: Any, count: int) -> None:
    assert len(list(faults(value, shape))) == count


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("string", "string"),
        ("integer or null", "integer or null"),
        ("[[number]]", [["number"]]),
        ("{*: any}", {"*": "any"}),
        (
            "{a, b?: integer, c: [{d: string}]}",
            {"a": "integer", "b?": "integer", "c": [{"d": "string"}]},
        ),
    ],
)
def test_shapes_are_read(text: str, shape: Any) -> None:
    assert parsed(text) == shape


@pytest.mark.parametrize(
    "text", ["{a b: integer}", "{a: integer, a: string}", "[a, b]", "a b", "'a'"]
)
def test_another_form_is_no_shape(text: str) -> None:
    with pytest.raises(ValueError):
        parsed(text)
