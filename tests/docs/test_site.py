"""The site builds without a warning, and needs no network when it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r'<(?:script|img|iframe|link)[^>]*(?:src|href)="(https?:[^"]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    pages = {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")}
    built = {path.name for path in site.glob("*.html")}
    assert pages | {"contributing.html", "changelog.html"} <= built


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        assert not LOADED.findall(path.read_text("utf-8")), path.name


def test_every_diagram_is_drawn(site: Path) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        wanted = path.read_text("utf-8").count("```mermaid\n")
        page = (site / f"{path.stem}.html").read_text("utf-8")
        assert page.count('<svg class="diagram"') == wanted, path.name


def test_files_that_pages_link_to_are_in_the_site(site: Path) -> None:
    assert (site / "deploy" / "mlxpool.toml").read_bytes() == (
        ROOT / "deploy" / "mlxpool.toml"
    ).read_bytes()
