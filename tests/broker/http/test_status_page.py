"""The file of the status page: it loads nothing else, and its policy allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest

from mlxpool.broker.http.status_page import PAGE, POLICY, content_security_policy

TEXT = PAGE.decode()


class Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(TEXT)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))


def test_it_is_small() -> None:
    assert len(PAGE) < 40_000


def test_it_loads_nothing() -> None:
    for tag, attributes in Elements().found:
        assert tag not in {"img", "iframe", "object", "embed", "base", "form", "audio", "video"}
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


@pytest.mark.parametrize("tag", ["script", "style"])
def test_the_policy_allows_the_one_element_by_its_hash(tag: str) -> None:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", TEXT, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in POLICY


def test_the_policy_allows_nothing_else() -> None:
    parts = dict(part.strip().split(" ", 1) for part in POLICY.split(";"))
    assert parts.pop("connect-src") == "'self'"
    assert parts.pop("img-src") == "data:"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]+'", parts.pop(name))
    assert set(parts.values()) == {"'none'"}
    assert set(parts) == {"default-src", "base-uri", "form-action", "frame-ancestors"}


def test_a_second_script_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="unpack"):
        content_security_policy(PAGE + b"<script>1</script>")


def test_every_element_that_the_script_asks_for_is_there() -> None:
    ids = {attributes["id"] for _, attributes in Elements().found if "id" in attributes}
    asked = set(re.findall(r'\$\("([\w-]+)"\)', TEXT)) | set(
        re.findall(r'new Table\("(\w+)"', TEXT)
    )
    assert asked and asked <= ids
