"""The commands and programs of the pages do what the pages say."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

import doc_blocks
from doc_blocks import RUN, Block, Step, agrees, blocks, steps

pytestmark = pytest.mark.timeout(600)  # a page is many processes, one after the other
ROOT = Path(__file__).parents[2]
PAGES = ("docs/quickstart.md", "docs/configuration.md", "README.md")
SERVE = Step("mlxpool serve 2> broker.log &", None, 0)
BEFORE = {"README.md": [SERVE]}  # what a page takes for granted
NOT_RUN = {"json", "toml", ""}  # shapes, excerpts, pictures


@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
    for entry in ("worker", "examples", "deploy"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as short:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLXPOOL_")}
        environment |= {"XDG_RUNTIME_DIR": short, "HOME": str(tmp_path), "XDG_CONFIG_HOME": short}
        wanted = [*BEFORE.get(name, []), *steps((ROOT / name).read_text("utf-8"))]
        done = doc_blocks.run(wanted, tmp_path, environment)
        log = tmp_path / "broker.log"
        said = log.read_text() if log.exists() else ""
    assert done, "the page has no blocks that are run"
    for step, code, printed in done:
        where = f"{name}:{step.line}: {step.command}\n{printed}\n{said}"
        assert code == 0, where
        assert step.printed is None or agrees(printed, step.printed), where


@pytest.mark.parametrize("name", PAGES)
def test_every_block_is_run_or_says_why_not(name: str) -> None:
    for block in blocks((ROOT / name).read_text("utf-8")):
        assert block.reason or block.kind in RUN | NOT_RUN, f"{name}:{block.line}"


# ---- the runner ----------------------------------------------------------------------------------

PAGE = """\
Text.

```console
$ echo one \\
  two
one two
$ true
```

<!-- not run: needs a GPU -->
```console
$ rm -rf /
```

```python
print("three")
```
"""


def test_blocks_and_steps() -> None:
    assert blocks(PAGE)[1] == Block("console", "$ rm -rf /\n", 11, "needs a GPU")
    first, second, third = steps(PAGE)
    assert first == Step("echo one \\\n  two", "one two", 4)
    assert second == Step("true", "", 7)
    assert third.printed is None and third.line == 15


def test_what_a_page_prints_and_how_it_ends(tmp_path: Path) -> None:
    page = "```console\n$ x=5\n$ echo $x; false\n$ ls nothing\n```\n```python\nprint(1 / 0)\n```"
    done = doc_blocks.run(list(steps(page)), tmp_path, os.environ)
    assert [code for _, code, _ in done] == [0, 1, 2, 1]
    assert done[1][2] == "5\n" and "ZeroDivisionError" in done[3][2]


@pytest.mark.parametrize(
    ("printed", "wanted", "same"),
    [
        ("a\nb\n", "a\nb", True),
        ("a\nb\n", "a", False),
        ("a 1\nb  \n", "a …\nb", True),
        ("a\nx\ny\nb\n", "a\n…\nb", True),
        ("a\nb\n", "a\n…\nb", True),
        ("a\nx\n", "a\n…\nb", False),
        ("a.b\n", "axb", False),
        ("", "", True),
        ("surplus\n", "", False),
        ("anything\n", "…", True),
    ],
)
def test_agrees(printed: str, wanted: str, same: bool) -> None:
    assert agrees(printed, wanted) is same
