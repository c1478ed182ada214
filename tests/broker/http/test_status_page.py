"""The status page loads no other resource, and its content security policy allows none."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from mlxpool.broker.http.routes import FOLDER, PAGE, POLICY, assembled
from support.colours import DEFICIENCIES, contrast, difference, palettes

TEXT = PAGE.decode()
SCRIPTS = ("figures.js", "plots.js", "tables.js", "cancel.js", "jobs.js", "log.js", "page.js")
LIGHT, DARK = palettes((FOLDER / "page.css").read_text())


class Elements(HTMLParser):
    """Collects every start tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(TEXT)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


def test_it_is_small() -> None:
    assert len(PAGE) < 55_000
    assert all(len(file.read_text().splitlines()) < 500 for file in FOLDER.iterdir())


def test_it_loads_nothing() -> None:
    for tag, attributes in Elements().found:
        assert tag not in {"img", "iframe", "object", "embed", "base", "audio", "video"}
        assert tag != "form" or attributes["method"] == "dialog", "it is sent nowhere"
        assert "src" not in attributes, (tag, attributes)
        if tag == "link":
            assert attributes["href"].startswith("data:")
        elif "href" in attributes:
            assert re.fullmatch(r"[a-z]+", attributes["href"]), "a path of the broker"
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", TEXT)


def test_no_handler_and_no_style_in_an_attribute() -> None:
    for tag, attributes in Elements().found:
        named = [name for name in attributes if name.startswith("on") or name == "style"]
        assert not named, (tag, named)


def test_what_comes_from_the_pool_is_never_read_as_html() -> None:
    forbidden = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval|new Function"
    assert not re.search(rf"\b({forbidden})\b", TEXT)


def test_the_files_are_in_the_page_in_their_order() -> None:
    places = [TEXT.index((FOLDER / name).read_text()) for name in ("page.css", *SCRIPTS)]
    assert places == sorted(places)
    assert {file.name for file in FOLDER.iterdir()} == {"page.html", "page.css", *SCRIPTS}


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_each_file_by_its_hash_and_nothing_else() -> None:
    parts = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))
    assert parts.pop("connect-src") == "'self'"
    assert parts.pop("img-src") == "data:"
    style, *scripts = (
        digest(f"\n{(FOLDER / name).read_text()}") for name in ("page.css", *SCRIPTS)
    )
    assert parts.pop("style-src") == style
    assert parts.pop("script-src").split() == scripts
    assert set(parts.values()) == {"'none'"}
    assert set(parts) == {"default-src", "base-uri", "form-action", "frame-ancestors"}


def test_a_file_that_would_end_its_element_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<script src="a.js"></script>')
    (tmp_path / "a.js").write_text("const end = '</script>';")
    with pytest.raises(ValueError, match=r"a\.js has '</s'"):
        assembled(tmp_path)


def test_every_element_that_the_script_asks_for_is_there() -> None:
    ids = {attributes["id"] for _, attributes in Elements().found if "id" in attributes}
    asked = set(re.findall(r'\$\("([\w-]+)"\)', TEXT)) | set(
        re.findall(r'new Table\("(\w+)"', TEXT)
    )
    assert asked and asked <= ids


# ---- colours -------------------------------------------------------------------------------------

THEMES = pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])


@THEMES
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_the_two_lines_of_a_plot_can_be_told_apart(
    colours: dict[str, str], deficiency: str
) -> None:
    assert difference(colours["blue"], colours["orange"], deficiency) > 60


@THEMES
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_neighbours_in_the_bar_of_a_workers_memory_can_be_told_apart(
    colours: dict[str, str], deficiency: str
) -> None:
    for colour, other in pairwise(("violet", "blue", "teal", "orange", "grey")):
        assert difference(colours[colour], colours[other], deficiency) > 15, (colour, other)


@THEMES
def test_text_has_the_contrast_of_wcag_and_so_have_lines(colours: dict[str, str]) -> None:
    for text in ("ink", "soft", "faint", "green", "amber", "red"):
        assert contrast(colours[text], colours["card"]) >= 4.5, text
    for text, ground in (("amber", "warn-ground"), ("red", "bad-ground"), ("soft", "ground")):
        assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for line in ("blue", "orange", "teal", "violet", "grey"):
        assert contrast(colours[line], colours["card"]) >= 3, line
