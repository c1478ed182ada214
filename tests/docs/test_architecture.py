"""docs/architecture.md is current: the parts made from the code, its paths, and its lists."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest

import make_architecture

ROOT = Path(__file__).parents[2]
PAGE = make_architecture.PAGE.read_text("utf-8")
TOPS = "|".join(make_architecture.SOURCES)
PATH = re.compile(rf"`((?:{TOPS})/[\w/]+\.(?:py|html))`")
MAX_FORMS = 9  # the most forms of a request, from a client to the scheduler
BOUNDS = {  # the most files that a change touches
    "a sampling option": 3,
    "a field of an HTTP interface": 3,
    "a verb of jobs": 6,
    "a message": 3,
    "an architecture": 2,
    "a metric": 2,
    "a setting": 2,
    "an HTTP route": 5,
    "an error": 2,
}


def file_of(path: str) -> Path:
    """Returns the file that a path of the page stands for."""
    top, _, rest = path.partition("/")
    return ROOT / path if rest.startswith("mlxpool/") else make_architecture.folder_of(top) / rest


def test_what_is_made_from_the_code_is_current() -> None:
    assert {match[2] for match in make_architecture.PART.finditer(PAGE)} == set(
        make_architecture.PARTS
    )
    assert make_architecture.page() == PAGE, "run `python docs/make_architecture.py`"


def test_every_path_exists() -> None:
    paths = PATH.findall(PAGE)
    assert len(paths) > 30
    missing = {
        path: [
            str(candidate.relative_to(ROOT))
            for candidate in ROOT.glob(f"*/mlxpool/**/{Path(path).name}")
        ]
        for path in paths
        if not file_of(path).is_file()
    }
    assert not missing, "the page names files that have moved; files of that name are listed"


@pytest.mark.parametrize("change", BOUNDS)
def test_a_change_touches_few_files(change: str) -> None:
    _, _, rest = PAGE.partition(f"### To add {change}\n")
    entries = re.findall(r"^\d+\. (.*)$", rest.partition("\n#")[0], re.M)
    assert all(PATH.match(entry) for entry in entries), "each entry begins with its file"
    assert 1 <= len({path for entry in entries for path in PATH.findall(entry)}) <= BOUNDS[change]


def test_a_request_has_few_forms_each_with_a_reason() -> None:
    table = PAGE.partition("### Its forms\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| `(.*)` \| (\w.*) \|$", table, re.M)
    assert 1 < len(rows) <= MAX_FORMS
    for names, path, _ in rows:
        text = file_of(path).read_text("utf-8")
        assert all(re.search(rf"^class {name}\b", text, re.M) for name in re.findall(r"\w+", names))


def test_every_change_has_a_bound() -> None:
    assert set(re.findall(r"^### To add (.*)$", PAGE, re.M)) == set(BOUNDS)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"
    BLACK = "black"
    WHITE = "white"
    GREY = "grey"


def test_an_event_from_many_states_is_listed_below_the_drawing() -> None:
    transitions: dict[Enum, dict[str, Enum]] = {
        Colour.RED: {"mix": Colour.BLUE, "end": Colour.BLACK},
        Colour.BLUE: {"mix": Colour.GREEN, "end": Colour.BLACK},
        Colour.GREEN: {"mix": Colour.GREEN, "end": Colour.BLACK},
        Colour.BLACK: {},
    }
    drawing, below = make_architecture.state_diagram(transitions).split("```\n\n")
    assert below == "- `end`: to black from every other state\n"
    arrows = re.findall(r"^  (\S+ --> .*)$", drawing, re.M)
    assert arrows == ["[*] --> red", "red --> blue: mix", "blue --> green: mix", "black --> [*]"]


def test_the_states_of_a_listed_event_are_named_where_many_lack_it() -> None:
    red, blue, green, *_ = Colour
    transitions: dict[Enum, dict[str, Enum]] = {
        each: {"end": Colour.BLACK} for each in (red, blue, green)
    }
    transitions |= {Colour.WHITE: {}, Colour.BLACK: {}}
    below = make_architecture.state_diagram(transitions).partition("```\n\n")[2]
    assert below == "- `end`: to black from every other state but white\n"
    transitions |= {Colour.GREY: {}}
    below = make_architecture.state_diagram(transitions).partition("```\n\n")[2]
    assert below == "- `end`: to black from red, blue, green\n"
