"""The table of commands, and the parser of the command line.

The help lists the commands in groups. An error about an unknown word names the most similar known
word.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from mlxpool.common.checks import did_you_mean
from mlxpool.common.escapes import escape_line

_COMMANDS = "mlxpool.cli.commands"

GROUPS = MappingProxyType(
    {
        "run a pool": {
            "serve": f"{_COMMANDS}.serve",
            "broker": f"{_COMMANDS}.serve",
            "worker": f"{_COMMANDS}.serve",
            "gateway": f"{_COMMANDS}.gateway",
            "ray": f"{_COMMANDS}.ray",
            "stop": f"{_COMMANDS}.pool",
        },
        "use its models": {
            "run": f"{_COMMANDS}.run",
            "chat": f"{_COMMANDS}.chat",
            "embed": f"{_COMMANDS}.embed",
            "rerank": f"{_COMMANDS}.embed",
            "classify": f"{_COMMANDS}.embed",
            "decide": f"{_COMMANDS}.decide",
        },
        "jobs that outlive their clients": {
            "submit": f"{_COMMANDS}.jobs",
            "fetch": f"{_COMMANDS}.jobs",
            "jobs": f"{_COMMANDS}.jobs",
            "retry": f"{_COMMANDS}.jobs",
            "release": f"{_COMMANDS}.jobs",
        },
        "see what it does": {
            "ps": f"{_COMMANDS}.reports",
            "top": f"{_COMMANDS}.top",
            "models": f"{_COMMANDS}.reports",
            "requests": f"{_COMMANDS}.reports",
            "stats": f"{_COMMANDS}.stats",
            "logs": f"{_COMMANDS}.logs",
        },
        "operate it": {
            "load": f"{_COMMANDS}.pool",
            "unload": f"{_COMMANDS}.pool",
            "drain": f"{_COMMANDS}.pool",
            "restart": f"{_COMMANDS}.pool",
            "cancel": f"{_COMMANDS}.pool",
            "reload": f"{_COMMANDS}.pool",
        },
        "models, settings, keys": {
            "pull": f"{_COMMANDS}.pull",
            "check": f"{_COMMANDS}.check",
            "config": f"{_COMMANDS}.settings",
            "prefix": f"{_COMMANDS}.prefix",
            "keygen": f"{_COMMANDS}.keygen",
            "revoke": f"{_COMMANDS}.revoke",
        },
        "more": {
            "bench": "mlxpool.bench.cli",
            "completion": f"{_COMMANDS}.about",
            "help": f"{_COMMANDS}.about",
            "version": f"{_COMMANDS}.about",
        },
    }
)
COMMAND_MODULES = {name: module for group in GROUPS.values() for name, module in group.items()}

# The modules whose commands take --endpoint, --server-key and --key. Other modules add these flags
# themselves: the --key of `submit` is the key of a job, and a gateway has several endpoints.
REMOTE_MODULES = frozenset(
    COMMAND_MODULES[name]
    for name in (
        "run",
        "chat",
        "embed",
        "decide",
        "ps",
        "stats",
        "top",
        "load",
        "revoke",
    )
)
# argparse's messages about a word that is not a choice; in Python 3.12 they have no quotes.
_CHOICE = re.compile(r"(argument \S+: )invalid choice: '?(.*?)'? \(choose from (.*)\)", re.S)
_UNKNOWN_FLAGS = re.compile(r"unrecognized arguments: (.*)", re.S)

KINDS = {  # start of argparse's message -> the kind of word, for our message
    "argument COMMAND: ": "command",
    "argument VERB: ": "command",
    "argument WHAT: ": "measurement",
}


class HelpFormatter(argparse.HelpFormatter):
    """A help formatter: the usage has no options if a line would be wider than the terminal."""

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None,
    ) -> str:
        actions = list(actions)
        text = super()._format_usage(usage, actions, groups, prefix)
        if max(map(len, text.splitlines())) <= self._width:
            return text
        words = [action for action in actions if not action.option_strings]
        short = super()._format_usage(usage, words, [], prefix)
        line = " ".join(short.replace(self._prog, f"{self._prog} [OPTION …]", 1).split())
        return "\n".join(textwrap.wrap(line, self._width, subsequent_indent="  ")) + "\n\n"


class Parser(argparse.ArgumentParser):
    """A parser whose errors name the most similar known word, also in its subcommands."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        named.setdefault("formatter_class", HelpFormatter)
        super().__init__(*arguments, **named)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes a text. Raises OSError if this fails; argparse would hide the error."""
        stream = file or sys.stderr
        stream.write(message)
        stream.flush()

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, and ends with exit code 2."""
        if (match := _CHOICE.fullmatch(message)) is not None:
            message = _unknown_choice(*match.groups())
        elif (match := _UNKNOWN_FLAGS.fullmatch(message)) is not None:
            flag = match[1].split()[0].partition("=")[0]
            message += did_you_mean(flag, self.flags()) if flag.startswith("--") else ""
        super().error(escape_line(message))

    def flags(self) -> list[str]:
        """Returns the flags of this parser and its subcommands."""
        flags: list[str] = []
        for action in self._actions:
            flags += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    flags += inner.flags()
        return flags


def _unknown_choice(argument: str, word: str, known: str) -> str:
    """Returns the error message for an unknown word.

    The arguments are pieces of argparse's message: an argument, the unknown `word`, and the known
    words.
    """
    words = re.findall(r"[\w.-]+", known)
    kind = KINDS.get(argument)
    hint = did_you_mean(word, words) or f"; known: {', '.join(words)}"
    return f"there is no {kind} '{word}'{hint}" if kind else f"{argument}not '{word}'{hint}"


class RootParser(Parser):
    """The parser of `mlxpool`: its help has the commands in groups."""

    def __init__(
        self,
        *arguments: Any,
        groups: Mapping[str, Iterable[str]],
        notes: Iterable[str],
        examples: Mapping[str, str],
        **named: Any,
    ) -> None:
        """`notes` and `examples` (command -> meaning) are the end of the help."""
        super().__init__(*arguments, **named)
        self.groups = groups
        self.notes = notes
        self.examples = examples

    def format_usage(self) -> str:
        return f"usage: {self.prog} [OPTION …] COMMAND …\n"

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        helps = self._helps_of_commands()
        for title, names in self.groups.items():
            formatter.start_section(title)
            formatter.add_arguments([helps[name] for name in names if name in helps])
            formatter.end_section()
        formatter.start_section("options")
        formatter.add_arguments([action for action in self._actions if action.option_strings])
        formatter.end_section()
        for note in self.notes:
            formatter.add_text(note)
        return f"{self.format_usage()}\n{formatter.format_help()}\n{self._shown_examples()}"

    def _shown_examples(self) -> str:
        """Returns the lines of the examples; their meanings are a second column if it fits."""
        widest = max(map(len, self.examples)) + 4
        formatter = HelpFormatter(self.prog, max_help_position=widest)
        formatter.start_section("examples")
        for command, meaning in self.examples.items():
            formatter.add_argument(argparse.Action([], command, help=meaning, metavar=command))
        formatter.end_section()
        return formatter.format_help()

    def _helps_of_commands(self) -> dict[str, argparse.Action]:
        return {
            choice.dest: choice
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for choice in action._choices_actions
        }
