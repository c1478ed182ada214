"""Codex and Claude Code at work with the demo chat model: the programs themselves.

They are npm packages: each is taken from PATH, or installed with npm into the cache of the tests.
The pool checks and tokenises the complete requests, which have 10,000 tokens and more. The demo
model has learnt contexts of only 1,024 tokens, so its chat template here shows it only the last
line of the user's last message.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.worker.weights.locate import DEMO_FOLDER
from support.pool import Pool

PACKAGES = {"codex": "@openai/codex@0.171.0", "claude": "@anthropic-ai/claude-code@2.1.197"}
CACHE = Path.home() / ".cache" / "mlxpool-tests" / "npm"
INSTALL_TIME = 300.0  # seconds, after which the test is skipped
PATIENCE = 300.0  # seconds, after which the test fails
ASK = "Say: it works"
# Like demo-chat's own template for one message. The names in the template's comment show that the
# model writes calls.
TEMPLATE = (
    "{# {{ tools }} <tool_call> <think> enable_thinking reasoning_effort #}"
    "{%- set said = (messages | selectattr('role', 'equalto', 'user') | list)[-1] -%}"
    "{{- '<|im_start|>user\\n' ~ said.content.strip().splitlines()[-1] ~ '<|im_end|>\\n' -}}"
    "{{- '<|im_start|>assistant\\n' -}}{%- if tools -%}{%- endif -%}"
)


def program(name: str) -> str:
    """Returns the path of an npm program; skips the test if it is not available."""
    path = shutil.which(name)
    if path is not None:
        return path
    if shutil.which("npm") is None:
        pytest.skip(f"neither {name} nor npm is there")
    folder = CACHE / PACKAGES[name].replace("/", "+")
    installed = folder / "node_modules" / ".bin" / name
    if not installed.exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        try:
            done = subprocess.run(
                [*command, PACKAGES[name]], capture_output=True, text=True, timeout=INSTALL_TIME
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm did not install {PACKAGES[name]} in {INSTALL_TIME:g} s")
        if done.returncode or not installed.exists():
            pytest.skip(f"npm cannot install {PACKAGES[name]}: {done.stderr.strip()[-300:]}")
    return str(installed)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("model") / "chat"
    shutil.copytree(DEMO_FOLDER.with_name("demo_chat"), folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    with Pool(tmp_path_factory.mktemp("pool"), f"[models.chat]\npath = '{folder}'\n") as running:
        yield running


def answer_of(command: list[str], folder: Path, **variables: str) -> str:
    """Returns the output of a program that runs in its own empty folder and home folder."""
    (folder / "work").mkdir()
    done = subprocess.run(
        command,
        cwd=folder / "work",
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_codex(url: str, tmp_path: Path) -> None:
    path = program("codex")
    config = f"""
model = "chat"
model_provider = "mlxpool"
approval_policy = "never"
sandbox_mode = "read-only"
[model_providers.mlxpool]
name = "mlxpool"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
    (tmp_path / "codex").mkdir()
    (tmp_path / "codex" / "config.toml").write_text(config)
    command = [path, "exec", "--skip-git-repo-check", ASK]
    assert "it works" in answer_of(command, tmp_path, CODEX_HOME=str(tmp_path / "codex"))


def test_claude_code(url: str, tmp_path: Path) -> None:
    path = program("claude")
    printed = answer_of(
        [path, "-p", ASK, "--model", "chat"],
        tmp_path,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_RETRIES="0",
    )
    assert "it works" in printed
