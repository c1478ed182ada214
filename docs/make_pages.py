"""Writes the pages that describe code: `python docs/make_pages.py`.

docs/python-api.md is made from the public docstrings of mlxpool.client, the tables of
docs/configuration.md from deploy/mlxpool.toml and the bounds in the schema of the settings. A test
checks that both pages are up to date.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlxpool.client
from mlxpool.client.job_options import BatchOptions, CallOptions, JobOptions
from mlxpool.common.config.bounds import OneOf, Within, declarations
from mlxpool.common.config.loading import variables
from mlxpool.common.config.schema import Counting, ModelConfig, PoolConfig
from mlxpool.common.errors import BY_CODE
from mlxpool.common.options import GenerateOptions

DOCS = Path(__file__).parent
SETTINGS = DOCS.parent / "deploy" / "mlxpool.toml"
BEGIN, END = "<!-- made by docs/make_pages.py -->\n", "<!-- until here -->\n"

# ---- docs/configuration.md -----------------------------------------------------------------------

SECTION = re.compile(r"^\[([^\]]+)\]")
LINE = re.compile(r"^(?P<off># )?(?P<key>\w+) = (?P<value>.*?)(?:\s{2,}#\s*(?P<text>.*))?$")
NO_BOUND = 2**31 - 1  # a bound as high as this is not shown: it only refuses nonsense


def tables() -> str:
    """A table for each section of deploy/mlxpool.toml."""
    parts: list[str] = []
    section = ""
    for line in SETTINGS.read_text("utf-8").splitlines():
        if (match := SECTION.match(line)) is not None:
            section = match[1]
            if section not in SHOWN:
                continue
            pool = section == "pool"
            parts += ["", f"### {SHOWN[section]}", "", "| key | default | bounds | is |"]
            parts += ["|---|---|---|---|"]
            if pool:
                parts[-2:] = ["| key | variable | default | bounds | is |", "|---|---|---|---|---|"]
        elif section in SHOWN and (match := LINE.match(line)) is not None:
            parts.append(_row(section, match))
    return "\n".join(parts) + "\n\n"


SHOWN = {
    "pool": "`[pool]`",
    "models.demo": "`[models.NAME]`",
    "models.counting.counting": '`[models.NAME.counting]`, for `path = "builtin:counting"` only',
}


KINDS = {"pool": PoolConfig, "models.demo": ModelConfig, "models.counting.counting": Counting}


def _row(section: str, match: re.Match[str]) -> str:
    key = match["key"]
    default = "" if match["off"] or key == "path" else f"`{match['value']}`"
    cells = [
        f"`{key}`",
        default,
        _bounds(KINDS[section], key),
        (match["text"] or "").replace("|", "\\|"),
    ]
    if section == "pool":
        variable = variables().get(key)
        cells.insert(1, f"`{variable}`" if variable else "")
    return f"| {' | '.join(cells)} |"


def _bounds(kind: type, key: str) -> str:
    for check in declarations(kind)[key].checks:
        if isinstance(check, OneOf):
            return ", ".join(f'`"{choice}"`' for choice in check.choices)
        if isinstance(check, Within) and check.high >= NO_BOUND:
            return f"at least {check.low:,g}"
        if isinstance(check, Within):
            return f"{check.low:,g} to {int(check.high):,}"
    return ""


def configuration() -> str:
    """The page with its tables replaced."""
    page = (DOCS / "configuration.md").read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


# ---- docs/python-api.md --------------------------------------------------------------------------

HEAD = """\
# The Python API

What `from mlxpool.client import …` gives; everything else may change without notice. Made from the
docstrings by docs/make_pages.py.

[quickstart.md](quickstart.md) has a first program, [examples.md](examples.md) whole ones;
[protocol.md](protocol.md) lists the options of `stream` and `generate`.

## Inputs

`Inputs` of `embed` and `classify` are a text, or a list of texts; for `classify` also a list of
pairs of texts, tuples of two. In place of texts there may be token ids with the special ones: a
list of ids for each input, or one list of ids for one input. Every list may be a tuple, an iterator
or a NumPy array.

## Questions

The `AnswerChoices` of `decide` are None, for yes or no, a list of 2 to 26 different texts, or a
`range` of 2 to 101 whole numbers from 0 to 1,000. `Asked` of `decide_all` is a question, or a
tuple of a question and its choices. [decisions.md](decisions.md) says what the answers are worth.

## Images

An `Image` is the content of a png, jpeg, webp or gif file, as bytes, bytearray or memoryview, or
the path of a file as a `pathlib.Path`. A path as a `str` is refused: texts often come from others,
who must not choose files of this machine. Models whose `features` have `vision` take images:

<!-- not run: needs a model that reads images -->
```python
from pathlib import Path

from mlxpool.client import Client

photo, drawing = Path("photo.jpg"), Path("drawing.png").read_bytes()

with Client() as client:
    question = [
        {"type": "image", "image": photo},
        {"type": "text", "text": "What is in this picture?"},
    ]
    answer = client.generate("eyes", messages=[{"role": "user", "content": question}])
    print(answer.text)

    # A prompt without a chat template names its images by their index.
    answer = client.generate("eyes", "[img-0] and [img-1] show", images=[photo, drawing])
    print(answer.text)
```

A request has at most 16 images, 8 MiB each and 32 MiB together. A chat sends its whole history each
time, so leave older images out before there are 17. `images` of a message, as in Ollama's
interface, is refused. [protocol.md](protocol.md#images) has all bounds.
"""
FORKS = """
## Processes that fork

A connection has a thread of its own, and `os.fork` copies no threads. So a client serves the
process that made it, and no fork of that: there each call and each read of a stream raises
BadRequest at once, with both process ids. The parent's client and its streams are not affected.
Make a client in each process, after the fork:

| program | where |
|---|---|
| gunicorn with `--preload` | in a function with `functools.cache` that requests call |
| uWSGI | in a function with the decorator `uwsgidecorators.postfork` |
| celery, prefork pool | in a function that `celery.signals.worker_process_init` calls |
| multiprocessing, start method `fork` | in the pool's `initializer`, or in the target |

A module that makes its client when it is imported can be used with gunicorn without `--preload`,
and with the start methods `spawn` and `forkserver`: each process imports it by itself.
"""
OPTIONS = """
## Options

The keyword arguments of `stream` and `generate`; `mlxpool.common.options.GenerateOptions` is their
type. None is the same as not given. [protocol.md](protocol.md#generate) has bounds and defaults.

"""
JOB_OPTIONS = """
## Options of jobs

`submit` takes these, whose types are in `mlxpool.client.job_options`, and the options above without
those of the reading: `queue_ms`, `first_token_ms`, `window`, `batch` and `durable`.
[jobs.md](jobs.md) says what a job is.

"""
CALL_OPTIONS = """
## Options of calls

`submit_call` takes the options of jobs and these; [protocol.md](protocol.md) says which of them the
call of a kind has.

"""
BATCH_OPTIONS = """
## Options of batches

`submit_batch` takes these, and the options above for lines that do not say otherwise.

"""
ERRORS = """
## Errors

Each is a `PoolError` with `code`, `message`, `details`, `retryable` (the same request can succeed
later) and `retry_after_ms`. They are in `mlxpool.common.errors`; [protocol.md](protocol.md#errors)
says what to do about each.

| class | code | retryable |
|---|---|---|
"""


def python_api() -> str:
    """The whole page."""
    parts = [HEAD]
    for name in sorted(mlxpool.client.__all__):
        parts += _of_class(name, getattr(mlxpool.client, name))
    rows = [
        f"| `{kind.__name__}` | `{code}` | {'yes' if kind.retryable else 'no'} |"
        for code, kind in sorted(BY_CODE.items())
    ]
    options = (
        (OPTIONS, GenerateOptions),
        (JOB_OPTIONS, JobOptions),
        (CALL_OPTIONS, CallOptions),
        (BATCH_OPTIONS, BatchOptions),
    )
    tables = "".join(head + _options(kind) for head, kind in options)
    return "\n".join(parts) + FORKS + tables + ERRORS + "\n".join(rows) + "\n"


def _options(kind: type[Any]) -> str:
    """A table of the options that a TypedDict adds to those of its bases, from its source."""
    found = OPTION.findall(inspect.getsource(kind))
    names = [name for name, _, _ in found]
    assert names == list(kind.__annotations__)[-len(names) :], f"{kind} has a line of another form"
    rows = (f"| `{name}` | `{_cell(kind)}` | {text} |\n" for name, kind, text in found)
    return "| option | type | is |\n|---|---|---|\n" + "".join(rows)


OPTION = re.compile(r"^    (\w+): (.*) \| None  # (.*)$", re.M)


def _of_class(name: str, kind: type[Any]) -> Iterator[str]:
    yield f"## {name}\n"
    if not (dataclasses.is_dataclass(kind) or name in NOT_MADE):
        yield f"`{name}{_signature(kind)}`\n"
    yield f"{_text(kind)}\n"
    if dataclasses.is_dataclass(kind):
        said = dict(COMMENT.findall(inspect.getsource(kind)))
        yield "| field | type | default | is |\n|---|---|---|---|"
        fields = dataclasses.fields(kind)
        yield "\n".join(_field(each, said.get(each.name, "")) for each in fields) + "\n"
    for key, value in _members(kind).items():
        if key.startswith("_") or not _is_documented(value):
            continue
        if isinstance(value, property):
            yield f"### {name}.{key}\n\n{_text(value)}\n"
        else:
            word = "await " if inspect.iscoroutinefunction(value) else ""
            yield f"### {name}.{key}\n\n`{word}{key}{_signature(value)}`\n\n{_text(value)}\n"


NOT_MADE = frozenset({"Batch", "AsyncBatch", "Stream", "AsyncStream"})  # a client makes them


def _members(kind: type[Any]) -> dict[str, Any]:
    """The members of a class, then those that it has of other classes of the client."""
    members: dict[str, Any] = {}
    for each in kind.__mro__:
        if each.__module__.startswith(mlxpool.client.__name__):
            members = {**members, **{k: v for k, v in vars(each).items() if k not in members}}
    return members


def _is_documented(value: object) -> bool:
    return bool(isinstance(value, property) or inspect.isfunction(value)) and bool(
        inspect.getdoc(value)
    )


def _signature(value: Any) -> str:
    whole = inspect.signature(value)
    kept = [p for p in whole.parameters.values() if p.name != "self"]
    return str(whole.replace(parameters=kept)).replace("'", "").removesuffix(" -> None")


def _text(value: object) -> str:
    return inspect.getdoc(value) or ""


COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.M)


def _field(field: dataclasses.Field[Any], said: str) -> str:
    default = ""
    if field.default is not dataclasses.MISSING:
        default = f"`{field.default!r}`"
    return f"| `{field.name}` | `{_cell(str(field.type))}` | {default} | {said} |"


PAGES = {"configuration.md": configuration, "python-api.md": python_api}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    tomllib.loads(SETTINGS.read_text("utf-8"))  # a broken file makes no page
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), "utf-8")


if __name__ == "__main__":
    main()
