"""docs/deploy.md and deploy/ name each other's contents. tests/docs runs the page's commands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "deploy.md"
TEXT = DOC.read_text("utf-8")


def files() -> set[Path]:
    folders = ("systemd", "launchd", "docker", "k8s")
    paths = {p for name in folders for p in (ROOT / "deploy" / name).rglob("*") if p.is_file()}
    return paths | {ROOT / "deploy" / "compose.yaml"}


def test_the_page_names_every_file_of_deploy() -> None:
    """The page names every file of deploy/; it may name an overlay by its folder only."""
    overlays = {p.parent for p in files() if p.parent.parent.name == "overlays"}
    assert overlays and not [p.name for p in overlays if f"overlays/{p.name}" not in TEXT]
    small = {"kustomization.yaml", "namespace.yaml"}
    paths = [p for p in files() if p.parent not in overlays and p.name not in small]
    assert paths and not [p.name for p in paths if p.name not in TEXT]


def test_every_link_has_a_target() -> None:
    for link in re.findall(r"\]\(([^)#]+)", TEXT):
        assert link.startswith("https://") or (DOC.parent / link).exists(), link
    headings = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", TEXT, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_figures_are_those_of_the_files() -> None:
    unit = (ROOT / "deploy" / "systemd" / "mlxpool.service").read_text("utf-8")
    limit = int(re.findall(r"LimitNOFILE=(\d+)", unit)[0])
    watchdog = int(re.findall(r"WatchdogSec=(\d+)", unit)[0])
    assert f"`LimitNOFILE={limit}`" in TEXT
    assert f"every {watchdog // 2} s (half of `WatchdogSec`)" in TEXT
