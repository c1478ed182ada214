"""Writes the pages that describe code: `python docs/make_pages.py`.

docs/python-api.md is made from the public docstrings of mlxpool.client, the tables of
docs/configuration.md from deploy/mlxpool.toml and the bounds in the schema of the settings. A test
checks that both pages are up to date.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import msgspec.structs

import mlxpool.client
from mlxpool.client.jobs import BatchOptions, CallOptions, JobOptions
from mlxpool.common.config.bounds import Within, declarations
from mlxpool.common.config.schema import Counting, ModelConfig, PoolConfig
from mlxpool.common.errors import BY_CODE, PoolError
from mlxpool.common.options import GenerateOptions

DOCS = Path(__file__).parent
SETTINGS = DOCS.parent / "deploy" / "mlxpool.toml"
BEGIN, END = "<!-- made by docs/make_pages.py -->\n", "<!-- until here -->\n"

# ---- docs/configuration.md -----------------------------------------------------------------------

SECTION = re.compile(r"^\[([^\]]+)\]")
LINE = re.compile(r"^(?P<off># )?(?P<key>\w+) = (?P<value>.*?)(?:\s{2,}#\s*(?P<text>.*))?$")
NO_BOUND = 1_000_000  # greater bounds are not shown: they only refuse nonsense


def tables() -> str:
    """Returns a table for each section of deploy/mlxpool.toml."""
    parts: list[str] = []
    section = ""
    for line in SETTINGS.read_text("utf-8").splitlines():
        if (match := SECTION.match(line)) is not None:
            section = match[1]
            if section not in SHOWN:
                continue
            parts += ["", f"### {SHOWN[section]}", "", "| key | default | is |", "|---|---|---|"]
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
    text = match["text"] or ""
    example = key == "path" or match["off"]
    cells = [
        f"`{key}`",
        "" if example else f"`{match['value']}`",
        text.replace("|", "\\|") + _bounds(KINDS[section], key),
    ]
    return f"| {' | '.join(cells)} |"


def _bounds(kind: type, key: str) -> str:
    """Returns a text with the bounds of a number; empty if the only bound is a minimum of 0."""
    for check in declarations(kind)[key].checks:
        if isinstance(check, Within) and check.high >= NO_BOUND:
            return f"; at least {check.low:,.16g}" if check.low else ""
        if isinstance(check, Within):
            return f"; {check.low:,g} to {int(check.high):,}"
    return ""


def configuration() -> str:
    """Returns the page with its tables made anew."""
    page = (DOCS / "configuration.md").read_text("utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


# ---- docs/python-api.md --------------------------------------------------------------------------

HEAD = """\
# The Python API

The names of `mlxpool.client`, made from the docstrings by docs/make_pages.py. All other names may
change without notice. [Quickstart](quickstart.md) and [Examples](examples.md) contain
programs. If the default of an argument is None, None may be passed.

- `Inputs` of `embed` and `classify`: a text or a list of texts; for `classify` also a list of
  pairs of texts. Token ids with the special ids may replace texts: a list of ids for each input,
  or one list for one input. A list may be a tuple, an iterator or a NumPy array.
- `AnswerChoices` of `decide`: None (yes or no), a list of 2 to 26 different texts, or a `range` of
  2 to 101 whole numbers from 0 to 1,000. `Asked` of `decide_all`: a question, or a tuple of a
  question and its choices. [Decisions](decisions.md) explains the answers.
- `JobRef`: a `Job`, its `key` or its `id`.

## Images

An `Image` is the content of a file (bytes, bytearray or memoryview) or a `pathlib.Path`. A path as
a `str` is refused: texts often come from users, who must not choose files of this machine. Models
with `vision` among their `features` take images:

<!-- not run: needs a model that reads images -->
```python
from pathlib import Path

from mlxpool.client import Client

photo, drawing = Path("photo.jpg"), Path("drawing.png").read_bytes()
question = [
    {"type": "image", "image": photo},
    {"type": "text", "text": "What is in this picture?"},
]
with Client() as client:
    client.generate("eyes", messages=[{"role": "user", "content": question}])
    # A prompt without a chat template names its images by their index.
    client.generate("eyes", "[img-0] and [img-1] show", images=[photo, drawing])
```

[Protocol](protocol.md#images) has formats and bounds. Each request of a chat has all its images,
at most 16: leave out older images. Images are parts of `content`; the member `images` of a message
is refused.
"""
FORKS = """
## Processes that fork

A client has a thread, and `os.fork` copies no threads: in a fork each call of the parent's client
and each read of its streams raises BadRequest. Make a client in each process, after the fork:

| program | place |
|---|---|
| gunicorn with `--preload` | a function with `functools.cache`, which requests call |
| uWSGI | a function with the decorator `uwsgidecorators.postfork` |
| celery, prefork pool | a function that `celery.signals.worker_process_init` calls |
| multiprocessing, start method `fork` | the pool's `initializer`, or the target |

With `spawn`, `forkserver`, or gunicorn without `--preload`, a module may make its client at import.
"""
OPTIONS = """
## Options

Keyword arguments of `stream` and `generate`, of the type `mlxpool.common.options.GenerateOptions`.
None means absent. [Protocol](protocol.md#generate) has the meaning, bounds and default of each;
`batch` is true by default.

"""
JOB_OPTIONS = """
## Options of jobs

`submit` takes these options (`mlxpool.client.jobs`) and the options above except `queue_ms`,
`first_token_ms`, `window`, `batch` and `durable`. Its `priority` may also be -1 or "idle": the job
runs when nothing else waits. Without `deadline_ms` a [job](jobs.md) has no deadline.

"""
CALL_OPTIONS = """
## Options of calls

`submit_call` takes `priority`, `deadline_ms`, the options of jobs, and the keys of the kind of call
([embed, rerank, classify](protocol.md#embed-rerank-classify), [decide](protocol.md#decide)):

"""
BATCH_OPTIONS = """
## Options of batches

`submit_batch` takes these options, `priority`, and the following options as defaults of its lines:
`tools`, `think`, `session` and the options of sampling.

"""
ERRORS = """
## Errors

Each error is a `PoolError` of `mlxpool.common.errors` with `code`, `message`, `details`,
`retryable` and `retry_after_ms`. [Protocol](protocol.md#errors) explains each code.
`QueueFull` has the code `queue_full`, and so on.

"""


def python_api() -> str:
    """Returns the whole page."""
    assert sorted(ORDER) == sorted(mlxpool.client.__all__)
    parts = [HEAD]
    for name in ORDER:
        parts += _of_class(name, getattr(mlxpool.client, name))
    options = "".join(
        (
            OPTIONS + _names(GenerateOptions),
            JOB_OPTIONS + _options(JobOptions),
            CALL_OPTIONS + _names(CallOptions),
            BATCH_OPTIONS + _options(BatchOptions),
        )
    )
    return "\n".join(parts) + FORKS + options + ERRORS + _errors()


def _errors() -> str:
    """Returns the classes of errors; first the errors after which a retry can succeed."""
    for code, kind in BY_CODE.items():
        assert code.replace("_", "") == kind.__name__.lower(), f"{kind} has the code {code}"
    return "".join(
        f"- {head}: {', '.join(f'`{kind.__name__}`' for kind in kinds)}.\n"
        for head, kinds in (
            ("Retryable, the same request can succeed later", _sorted(retryable=True)),
            ("Not retryable", _sorted(retryable=False)),
        )
    )


def _sorted(*, retryable: bool) -> list[type[PoolError]]:
    kinds = [kind for kind in BY_CODE.values() if kind.retryable is retryable]
    return sorted(kinds, key=lambda kind: kind.__name__)


ORDER = (
    *("Client", "AsyncClient", "Stream", "AsyncStream", "Delta", "Result"),
    *("ChoicesStream", "AsyncChoicesStream", "Choices", "ChatTokens"),
    *("Vectors", "Ranking", "Ranked", "Decision", "DecisionList"),
    *("Job", "Batch", "AsyncBatch", "LineResult", "Pace", "PoolError"),
)
MADE = frozenset({"Client", "Pace"})  # classes that users construct; other objects are answers


def _options(kind: type[Any]) -> str:
    """Returns a table of the options that a TypedDict adds to its bases."""
    rows = [(f"`{name}`", f"`{_short(kind)}`", text) for name, kind, text in _declared(kind)]
    return _table(("option", "type", "meaning"), rows)


def _names(kind: type[Any]) -> str:
    """Returns the names and types of the options that a TypedDict adds to its bases."""
    names = ", ".join(f"`{name}: {_short(kind)}`" for name, kind, _ in _declared(kind))
    return f"{names}.\n"


def _declared(kind: type[Any]) -> list[tuple[str, str, str]]:
    """Returns name, type and comment of the options that a TypedDict adds, from its source."""
    options = OPTION.findall(inspect.getsource(kind))
    names = [name for name, _, _ in options]
    assert names == list(kind.__annotations__)[-len(names) :], f"{kind} has a line of another form"
    return options


OPTION = re.compile(r"^    (\w+): (.*) \| None  # (.*)$", re.M)


def _of_class(name: str, kind: type[Any]) -> Iterator[str]:
    yield f"## {name}\n"
    if name in MADE and not issubclass(kind, msgspec.Struct):
        yield f"`{name}{_signature(kind)}`\n"
    yield f"{_text(kind)}\n"
    members = {key: value for key, value in _members(kind).items() if _is_documented(key, value)}
    if name.startswith("Async"):
        twin = name.removeprefix("Async")
        same = set(_members(getattr(mlxpool.client, twin))) & set(members)
        members = {key: value for key, value in members.items() if key not in same}
    fields = [*_fields(kind, name in MADE), *_properties(members)]
    if fields:
        yield _table(("field", "type", "default", "meaning"), fields)
    methods = {key: value for key, value in members.items() if not isinstance(value, property)}
    if methods and not name.endswith("Client"):
        yield _table(("method", "meaning"), [_method_row(*each) for each in methods.items()])
        return
    for key, value in methods.items():
        yield f"### {name}.{key}\n\n`{_call(key, value)}`\n\n{_text(value)}\n"


def _fields(kind: type[Any], is_made: bool) -> Iterator[tuple[str, ...]]:
    """Yields rows of a record: name, type, default if users make such objects, and comment."""
    if issubclass(kind, msgspec.Struct):
        comments = dict(COMMENT.findall(inspect.getsource(kind)))
        types = inspect.get_annotations(kind)
        for each in msgspec.structs.fields(kind):
            default = f"`{each.default!r}`" if is_made else ""
            yield (
                f"`{each.name}`",
                f"`{_short(types[each.name])}`",
                default,
                comments.get(each.name, ""),
            )


def _properties(members: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for key, value in members.items():
        if isinstance(value, property) and value.fget is not None:
            kind = inspect.signature(value.fget).return_annotation
            yield f"`{key}`", f"`{_short(kind)}`", "", _line(value)


def _method_row(key: str, value: Any) -> tuple[str, str]:
    return f"`{_call(key, value)}`", _line(value)


def _call(key: str, value: Any) -> str:
    word = "await " if inspect.iscoroutinefunction(value) else ""
    return f"{word}{key}{_signature(value)}"


def _line(value: object) -> str:
    """Returns the docstring of a value in one line, for a cell of a table."""
    return " ".join(_text(value).split())


COMMENT = re.compile(r"^    (\w+): .*?  # (.*)$", re.M)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Returns a table without the columns that are empty in all rows; escapes `|` in cells."""
    used = [number for number in range(len(head)) if any(row[number] for row in rows)]
    lines = [[head[number] for number in used]]
    lines += [[row[number].replace("|", "\\|") for number in used] for row in rows]
    first, *others = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join((first, "|---" * len(used) + "|", *others, ""))


def _members(kind: type[Any]) -> dict[str, Any]:
    """Returns the members of a class: its own, then those inherited from other client classes."""
    members: dict[str, Any] = {}
    for each in kind.__mro__:
        if each.__module__.startswith(mlxpool.client.__name__):
            own = {
                k: v.__func__ if isinstance(v, classmethod) else v for k, v in vars(each).items()
            }
            members = {**members, **{k: v for k, v in own.items() if k not in members}}
    return members


def _is_documented(key: str, value: object) -> bool:
    """Returns whether a member is documented: public, with a docstring, and not `ask`."""
    is_member = isinstance(value, property) or inspect.isfunction(value)
    return is_member and not key.startswith("_") and key != "ask" and bool(inspect.getdoc(value))


def _signature(value: Any) -> str:
    whole = inspect.signature(value)
    kept = [p for p in whole.parameters.values() if p.name not in ("self", "cls")]
    text = _short(str(whole.replace(parameters=kept))).removesuffix(" -> None")
    return text if value.__name__ == "stream" else text.replace(OF_REQUESTS, "…")


OF_REQUESTS = (  # the arguments of all requests: `stream` shows them
    "model: str, prompt: str = None, *, messages: Sequence[Mapping] = None, "
    "tokens: Sequence[int] = None, images: Sequence[Image] = ()"
)


def _short(annotation: str) -> str:
    """Returns a type or default without quotes, with plain Mapping and dict for JSON objects.

    Leaves out `| None` before a default of None.
    """
    for long, short in SHORTER.items():
        annotation = annotation.replace(long, short)
    return annotation.replace("'", "")


SHORTER = {
    "Mapping[str, Any]": "Mapping",
    "dict[str, Any]": "dict",
    "= ''": '= ""',
    " | None' = None": " = None",
}


def _text(value: object) -> str:
    return inspect.getdoc(value) or ""


PAGES = {"configuration.md": configuration, "python-api.md": python_api}


def main() -> None:
    tomllib.loads(SETTINGS.read_text("utf-8"))  # raises for a broken file: no page is written
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), "utf-8")


if __name__ == "__main__":
    main()
