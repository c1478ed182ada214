"""Every block of every page is run, and does what the page promises.

tests/support/doc_blocks.py runs the blocks; tests/support/program_stubs.py replaces the programs
that no test may run, and names the reason for each.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from support import doc_blocks, program_stubs
from support.doc_blocks import RUNNABLE, Block, Command, agrees, blocks, commands
from support.free_ports import free_ports

ROOT = Path(__file__).parents[2]
ELSEWHERE = {  # kinds of blocks that other tests run
    "json": "tests/end_to_end/test_metrics.py the log line",
    "hex": "test_protocol_page.py sends them to a broker",
    "js": "tests/examples/test_node_client.py",
    "mermaid": "test_site.py has a browser draw them",
    "text": "no code: a picture, a prompt, an answer; test_cli_page.py compares shapes of JSON",
}
PORT_NAMES = ("7200", "7201", "7202", "9464", "11434", "11435")
PORTS = re.compile(rf"(?<=[: ])({'|'.join(PORT_NAMES)})\b")
PLACES = re.compile(r"(?<![\w./$@~-])/(?=(?:data|etc|home|opt|path|run|var)/)")


@dataclass(frozen=True, slots=True)
class Page:
    """The requirements of a page whose commands a test runs, and the texts replaced in it.

    `before`: commands that the test runs first. `instead`: texts of the page and their
    replacements. In every page, absolute folders are moved into a folder of the test, and ports are
    replaced by free ports.
    """

    before: tuple[str, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages that the page needs
    programs: tuple[str, ...] = ()  # programs of the page that some machines lack


def unquoted(words: str) -> str:
    """Quotes words so that the shell evaluates them inside a text in single quotes."""
    return f"'\"{words}\"'"


def public(name: str) -> str:
    """Returns a shell command for the public key of a pair that the page has made."""
    return f"$(sed -n 's/^public = \"\\(.*\\)\"/\\1/p' ~/.mlxpool/keys/{name}.key)"


def section(name: str, role: str) -> tuple[str, str]:
    """Returns a section of the allow-list twice: with `…` as on the page, and with the real key."""
    text = f'[keys.{name}]\nrole = "{role}"\npublic = '
    return f'{text}"…"', f'{text}"{unquoted(public(name))}"'


LOADED = "mlxpool load demo --wait && mlxpool load counting --wait"
KNOWN = tuple(
    f"until mlxpool models --wide | grep -q '{name} .*batching'; do :; done"
    for name in ("demo", "counting")
)
BROKEN = (
    "mkdir -p models/broken",
    "grep -v rms_norm_eps worker/mlxpool/worker/demo/config.json > models/broken/config.json",
    "cp worker/mlxpool/worker/demo/*.safetensors models/broken",
    """printf '{"weight_map": {"w": "model-00002-of-00003.safetensors"}}' > """
    "models/broken/model.safetensors.index.json",
)
PAGES = {
    "README.md": Page(needs=("openai",), programs=("curl",)),
    "CONTRIBUTING.md": Page(),
    "docs/agents.md": Page(
        needs=(
            "agents",
            "anthropic",
            "langchain_anthropic",
            "langchain_openai",
            "litellm",
            "openai",
            "pydantic_ai",
        ),
    ),
    "docs/adding-a-model.md": Page(instead={"test_NAME": "test_llama"}),
    "docs/benchmarks.md": Page(),
    "docs/configuration.md": Page(),
    "docs/demo-model.md": Page(),
    "docs/embeddings.md": Page(),
    "docs/jobs.md": Page(),
    "docs/decisions.md": Page(),
    "docs/structured-output.md": Page(needs=("openai",)),
    "docs/choices.md": Page(),
    "docs/deploy.md": Page(("mkdir -p /var/lib/mlxpool/models ~/Library/LaunchAgents",)),
    "docs/gateway.md": Page(
        needs=("openai",),
        programs=("curl",),
    ),
    "docs/groups.md": Page(),
    "docs/kv-cache.md": Page(),
    "docs/models.md": Page(
        (
            "mkdir -p ~/models/org/small-3b /data/large",
            *BROKEN,
            "mlxpool serve 2> broker.log &",
            LOADED,
            *KNOWN,
        ),
        {  # texts that depend on the machine
            "slabs": "…",
            "up to 5.1 GB": "…",
            "cpu, 25.3 GB, 24.4 GB free now": "…",
            "20.2 GB, the pool 20.2 GB": "…",
        },
    ),
    "docs/operate.md": Page(),
    "docs/prefix-cache.md": Page(),
    "docs/speculation.md": Page(),
    "docs/routing.md": Page(),
    "docs/quickstart.md": Page(needs=("openai",), programs=("curl",)),
    "docs/reliability.md": Page(),
    "docs/scale.md": Page(("mkdir -p /data/small",)),
    "docs/security.md": Page(
        instead={
            "/home/mlxpool": unquoted("$HOME"),
            "/home/alice": unquoted("$HOME"),
            "tcp://pool:": "tcp://127.0.0.1:",
            "--server-key '…'": f'--server-key "{public("pool")}"',
            'server_key="…"': f'server_key="{unquoted(public("pool"))}"',
            **dict([section("alice", "client"), section("gpu-1", "worker")]),
            **dict([section("chief", "admin")]),
        }
    ),
}


def ports_of_pages() -> dict[str, int]:
    """Returns a free port for each port that pages name."""
    return dict(zip(PORT_NAMES, free_ports(len(PORT_NAMES)), strict=True))


def placed(page: Page, command: Command, root: Path, ports: Mapping[str, int]) -> Command:
    """Returns a command with the test's paths and ports in place of the page's."""

    def here(text: str) -> str:
        for theirs, ours in page.instead.items():
            text = text.replace(theirs, ours)
        return PORTS.sub(lambda m: str(ports[m[1]]), PLACES.sub(f"{root}/", text))

    printed = None if command.printed is None else here(command.printed)
    return replace(command, text=here(command.text), printed=printed)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(name: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
    for package in PAGES[name].needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for program in PAGES[name].programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    for entry in ("Makefile", "bench", "examples", "pyproject.toml", "tests", "worker"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")  # copied: a page writes keys there
    page = PAGES[name]
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as short:
        ports = ports_of_pages()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLXPOOL_")}
        environment |= {"XDG_RUNTIME_DIR": short, "HOME": str(tmp_path), "XDG_CONFIG_HOME": short}
        environment["XDG_STATE_HOME"] = str(tmp_path / "states")
        environment[program_stubs.ROOT_VARIABLE] = short
        # Otherwise LiteLLM fetches prices from the network.
        environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        wanted = [Command(text, None, 0) for text in page.before]
        wanted += commands((ROOT / name).read_text("utf-8"))
        wanted = [placed(page, command, Path(short), ports) for command in wanted]
        done = doc_blocks.run(wanted, tmp_path, environment)
        log = tmp_path / "broker.log"
        said = log.read_text() if log.exists() else ""
    assert len(done) > len(page.before), "the page has no blocks that are run"
    for command, code, printed in done:
        where = f"{name}:{command.line}: {command.text}\n{printed}\n{said}"
        assert code == command.ends, where
        assert command.printed is None or agrees(printed, command.printed, loose=command.loose), (
            where
        )


DOCS = ROOT / "docs"
NOTES = sorted(DOCS.glob("notes/*.md"))  # none of their blocks can be run here
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *NOTES]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_every_block_is_run_or_has_a_reason(path: Path) -> None:
    """Each block of a page is run, or the page or ELSEWHERE gives the reason why it is not.

    Indented text is refused, because the site would show it as a block.
    """
    text = path.read_text("utf-8")
    name = str(path.relative_to(ROOT))
    for block in blocks(text):
        assert block.kind in RUNNABLE | set(ELSEWHERE), f"{name}:{block.line}"
        assert block.reason or block.kind in ELSEWHERE or name in PAGES, f"{name}:{block.line}"
    rest = doc_blocks.FENCE.sub("", text)
    assert not re.findall(r"^\n    \S.*", rest, re.M)


def test_programs_that_are_not_run_have_a_reason() -> None:
    """The programs with stubs are the programs with a reason why no test runs them."""
    assert {words.split()[0] for words in program_stubs.REASONS} == set(program_stubs.STUBS)


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


def test_blocks_and_commands() -> None:
    assert blocks(PAGE)[1] == Block("console", "$ rm -rf /\n", 11, "needs a GPU")
    first, second, third = commands(PAGE)
    assert first == Command("echo one \\\n  two", "one two", 4)
    assert second == Command("true", "", 7)
    assert third.printed is None and third.line == 15


def test_what_a_page_prints_and_how_it_ends(tmp_path: Path) -> None:
    page = "```console\n$ x=5\n$ echo $x; false\n$ ls nothing\n```\n```python\nprint(1 / 0)\n```"
    done = doc_blocks.run(list(commands(page)), tmp_path, os.environ)
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
