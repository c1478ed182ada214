"""The example with OpenAI's batches does what its docstring promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.counting_checker import expected_ids, text_of
from support.gateway_thread import GatewayThread
from support.pool import PATIENCE, Pool

SCRIPT = Path(__file__).parents[2] / "examples" / "openai_batch.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def line(name: str, **more: Any) -> str:
    body = {"model": "counting", "prompt": name, "max_tokens": 3, "seed": 7, **more}
    url = "/v1/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def test_lines_are_answered_or_named(tmp_path: Path) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text("\n".join(line(f"line {number}") for number in range(10)))
    with (
        Pool(tmp_path, arguments=("--state-dir", str(tmp_path / "jobs"))) as pool,
        GatewayThread(pool.run_dir) as gateway,
    ):
        flags = ("--url", gateway.url, "--endpoint", "/v1/completions")
        done = run(requests, answers, *flags)
        assert done.returncode == 0, done.stderr
        results = [json.loads(data) for data in answers.read_text().splitlines()]
        for number, result in enumerate(results):
            text = result["response"]["body"]["choices"][0]["text"]
            assert text == text_of(expected_ids(f"line {number}", 7, 3))
        assert len(results) == 10
        batch = done.stderr.splitlines()[-1].partition(":")[0]
        assert run("--batch", batch, answers, *flags).returncode == 0
        requests.write_text(line("bad", bogus=1))
        refused = run(requests, answers, *flags)
        assert refused.returncode == 1 and "line 1: unknown field 'bogus'" in refused.stderr
    assert run(requests, answers).returncode == 1
