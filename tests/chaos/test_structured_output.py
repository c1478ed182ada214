"""A worker is killed during an answer with a format: the answer is the same, and can be parsed."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from chaos.engine_faults import install_fault
from chaos.harness import WEIGHTS_LIMITS
from mlxpool.client import Client, Result
from support.pool import Pool, until

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

PROMPT = "import json\n\n\ndef load(path):\n    "
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"key_{number}": {"type": "string", "pattern": "^[a-z]{2,9}$"} for number in range(5)
    },
    "required": [f"key_{number}" for number in range(5)],
    "additionalProperties": False,
}
OPTIONS: dict[str, Any] = {
    "format": {"type": "json_schema", "schema": SCHEMA},
    "max_tokens": 200,
    "temperature": 0.9,
}
PLACES = (0, 1, 9, 26)  # number of ids before the fault, for each seed
# Ends the process once for each seed, when the seed's row has the number of ids in PLACES, or more
# if several ids come together. The folder MARKS has a file for each seed that had its fault.
FAULT = f"""\
import os, signal

def arm(engine):
    draw = engine.draw

    def draw_or_end(self, masks):
        for row in masks.lines:
            if len(row.ids) >= {PLACES!r}[row.seed]:
                try:
                    mark = os.path.join(os.environ["MARKS"], str(row.seed))
                    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        draw(self, masks)

    engine.draw = draw_or_end
"""


def test_a_kill_at_any_id_changes_nothing(tmp_path: Path) -> None:
    environment = {**install_fault(tmp_path, FAULT), "MARKS": str(tmp_path)}
    with (
        Pool(tmp_path, WEIGHTS_LIMITS, environment=environment) as pool,
        pool.client() as client,
    ):
        for seed, place in enumerate(PLACES):
            hit = client.generate("demo", PROMPT, seed=seed, **OPTIONS)
            assert hit.attempts == 2 and (tmp_path / str(seed)).exists(), place
            whole = client.generate("demo", PROMPT, seed=seed, **OPTIONS)
            assert whole.attempts == 1 and len(whole.ids) > place
            assert hit.ids == whole.ids and hit.text == whole.text, place
            assert hit.reason == "stop" and hit.complete is True
            jsonschema.validate(json.loads(hit.text), SCHEMA)


@pytest.mark.long
def test_a_storm_of_constrained_streams(tmp_path: Path) -> None:
    """Workers are killed while they run batches of constrained and unconstrained streams."""
    demo = '[models.demo]\npath = "builtin:demo"\nreplicas = 2\nsequences = 8\n'
    seeds = range(24)

    def ask(client: Client, seed: int) -> Result:
        options = {**OPTIONS, **({"format": None, "max_tokens": 60} if seed % 4 == 3 else {})}
        result: Result = client.generate("demo", PROMPT, seed=seed, **options)
        return result

    with Pool(tmp_path, WEIGHTS_LIMITS + demo) as pool, pool.client() as client:
        calm, again = [ask(client, seed) for seed in seeds], 0
        with ThreadPoolExecutor(len(seeds)) as threads:
            for number in range(4):
                futures = [threads.submit(ask, client, seed) for seed in seeds]
                until(lambda: any(future.done() for future in futures), "the first answer")  # noqa: B023
                pool.kill_worker(f"demo/{number % 2}", signal.SIGKILL)
                results = [future.result() for future in futures]
                assert [result.ids for result in results] == [result.ids for result in calm]
                again += sum(result.attempts > 1 for result in results)
        assert again, "no kill hit a stream"
    for seed, result in zip(seeds, calm, strict=True):
        if seed % 4 != 3:
            jsonschema.validate(json.loads(result.text), SCHEMA)
