"""The site builds without a warning, needs no network for its readers, and draws its diagrams."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chromium import Chromium
from support.pool import until

ROOT = Path(__file__).parents[2]
DIAGRAMS = {
    path.stem: count
    for path in sorted((ROOT / "docs").glob("*.md"))
    if (count := path.read_text("utf-8").count("```mermaid\n"))
}
MERMAID = "docs/js/" + re.findall(r"js/(mermaid\S+)", (ROOT / "mkdocs.yml").read_text("utf-8"))[0]
LOADED = re.compile(r'<(?:script|img|iframe|link)[^>]*(?:src|href)="(https?:[^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it, with Mermaid from npm."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    process = subprocess.run(["make", MERMAID], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    docs = ROOT / "docs"
    written = [*docs.glob("*.md"), *docs.glob("notes/*.md")]
    pages = {str(path.relative_to(docs).with_suffix(".html")) for path in written}
    built = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert pages | {"contributing.html", "changelog.html"} <= built


def test_titles_and_links_are_those_of_readers(site: Path) -> None:
    """No page's title repeats the site's name, and no link's text is the name of a file."""
    pages = {path.name: path.read_text("utf-8") for path in site.glob("*.html")}
    titles = {name: re.findall(r"<title>(.*?)</title>", html)[0] for name, html in pages.items()}
    assert [name for name, title in titles.items() if title == "mlxpool - mlxpool"] == []
    assert len(set(titles.values()) - {"mlxpool"}) > 30
    named = {n: re.findall(r'<a href="[^"]*">([\w-]+\.md)</a>', html) for n, html in pages.items()}
    assert {name: links for name, links in named.items() if links} == {}


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not LOADED.findall(path.read_text("utf-8")), path.name


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as running:
        yield running


@pytest.mark.parametrize("name", DIAGRAMS)
def test_every_diagram_is_drawn(name: str, site: Path, browser: Chromium) -> None:
    browser.events()
    browser.open((site / f"{name}.html").as_uri())
    until(lambda: len(drawings(browser)) == DIAGRAMS[name], f"the diagrams of {name} are drawn")
    assert all("error" not in drawing for drawing in drawings(browser))
    sent = [e["params"] for e in browser.events() if e["method"] == "Network.requestWillBeSent"]
    assert not [url for params in sent if (url := params["request"]["url"]).startswith("http")]


@pytest.mark.parametrize("name", ["index", "concepts", "benchmarks", "operate"])
def test_a_page_fits_a_narrow_screen(name: str, site: Path, browser: Chromium) -> None:
    """Wide tables and code scroll by themselves; the page does not."""
    browser.open((site / f"{name}.html").as_uri(), width=400)
    until(
        lambda: browser.run("return document.querySelectorAll('.md-typeset__table').length") > 0,
        "the theme has put its tables into boxes that scroll",
    )
    width, seen = browser.run(
        "const page = document.documentElement; return [page.scrollWidth, page.clientWidth]"
    )
    assert width <= seen == 400


def drawings(browser: Chromium) -> list[str]:
    """Returns the `aria-roledescription` of each SVG in a shadow root.

    The value is the kind of drawing, such as "sequence"; "error" if Mermaid could not draw it.
    """
    tree = browser.command("DOM.getDocument", depth=-1, pierce=True)
    return list(_drawings(tree["root"], inside=False))


def _drawings(node: dict[str, Any], *, inside: bool) -> Iterator[str]:
    if inside and node["nodeName"] == "svg":
        names = node["attributes"][::2]
        yield dict(zip(names, node["attributes"][1::2], strict=True)).get(
            "aria-roledescription", "error"
        )
        return
    for child in node.get("children", ()):
        yield from _drawings(child, inside=inside)
    for root in node.get("shadowRoots", ()):
        yield from _drawings(root, inside=True)


def test_files_that_pages_link_to_are_in_the_site(site: Path) -> None:
    assert (site / "deploy" / "mlxpool.toml").read_bytes() == (
        ROOT / "deploy" / "mlxpool.toml"
    ).read_bytes()
