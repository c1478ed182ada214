"""Workers of all models share the GPUs that a broker may use. The tests need no GPU.

The broker is told that it has four GPUs, but all models compute on the CPU. The tests read from the
environment of each worker's process which GPUs the broker has given it.
"""

from __future__ import annotations

import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import ModelLoadFailed
from support.counting_checker import expected_ids
from support.pool import PATIENCE, Pool, until
from support.worker_checkpoints import write_checkpoint

mx = pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)
pytestmark = pytest.mark.skipif(
    mx.default_device().type == mx.DeviceType.gpu, reason="its GPUs have other names"
)

SETTINGS = """
[pool]
metrics = "127.0.0.1:0"
restart_delay = 0.05
[models.first]
path = "builtin:counting"
counting.step_us = 500
pin = true
[models.second]
path = "builtin:counting"
[models.chosen]
path = "builtin:counting"
gpu_ids = ["GPU-b"]
[models.elsewhere]
path = "builtin:counting"
gpu_ids = [7]
[models.group]
path = "{folder}"
context = 128
sequences = 2
devices = 2
memory_limit = 2147483648
[models.large]
path = "{folder}"
context = 128
devices = 5
[models.scaled]
path = "builtin:counting"
counting.step_us = 1000
sequences = 1
replicas = {{ min = 1, max = 3, waiting_tokens = 1, cool_down = 0 }}
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("pool")
    model = write_checkpoint(folder / "model", model_type="qwen3", head_dim=16)
    environment = {"CUDA_VISIBLE_DEVICES": "0,GPU-b,2,3"}
    with Pool(folder, SETTINGS.format(folder=model), environment=environment) as running:
        running.in_state("first/0", state="ready")
        yield running


def visible_to(pid: int) -> str:
    """Returns the GPUs in the process's environment at its start."""
    return psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"]


def loaded(pool: Pool, model: str) -> dict[str, Any]:
    """Returns the row of the model's first worker, as soon as it is ready."""
    done = pool.cli("load", model, "--wait")
    assert done.returncode == 0, done.stderr
    return pool.in_state(f"{model}/0", state="ready")


def unload(pool: Pool, *models: str) -> None:
    for model in models:
        assert pool.cli("unload", model).returncode == 0
        pool.in_state(f"{model}/0", state="none")


def used(pool: Pool) -> Counter[str]:
    """Returns the number of workers and ranks on each GPU."""
    return Counter(gpu for row in pool.ask("ps")["workers"] for gpu in row.get("gpus", ()))


def test_each_worker_and_each_rank_has_a_gpu_of_its_own(pool: Pool) -> None:
    first, second, group = (loaded(pool, name) for name in ("first", "second", "group"))
    assert (first["gpus"], visible_to(first["pid"])) == (["0"], "0")
    assert (second["gpus"], visible_to(second["pid"])) == (["GPU-b"], "GPU-b")
    assert (group["gpus"], visible_to(group["pid"])) == (["2", "3"], "2,3")
    pid = until(lambda: pool.worker("group/0")["ranks"][0]["pid"], "its rank has begun")
    assert visible_to(pid) == "3"
    lines = [line.split() for line in pool.cli("ps", "--wide").stdout.splitlines()]
    place = next(line.index("GPU") for line in lines if line[:1] == ["SLOT"])
    gpus = {line[0]: line[place] for line in lines if len(line) > place}
    assert (gpus["first/0"], gpus["second/0"], gpus["group/0"]) == ("0", "GPU-b", "2")
    assert [line[3] for line in lines if line[:2] == ["rank", "1"]] == ["3"]
    with urllib.request.urlopen(
        pool.ask("ps")["broker"]["metrics"] + "/metrics", timeout=PATIENCE
    ) as answer:
        metrics = answer.read().decode()
    assert 'mlxpool_worker_gpu_info{model="group",worker="group/0",gpu="3"} 1' in metrics
    assert "worker=second/0" in pool.log() and "gpus=GPU-b" in pool.log()
    unload(pool, "second", "group")
    assert used(pool) == {"0": 1}


def test_a_killed_worker_has_its_gpu_again_and_its_stream_every_token(pool: Pool) -> None:
    second = loaded(pool, "second")
    with pool.client() as client, client.stream("first", "hi", max_tokens=900, seed=3) as stream:
        ids: list[int] = []
        killed: int | None = None
        for delta in stream:
            ids += delta.ids
            if not killed:
                killed = pool.kill_worker("first/0")
    assert ids == expected_ids("hi", 3, 900)
    first = pool.in_state("first/0", state="ready")
    assert first["pid"] != killed and first["restarts"] >= 1
    assert (first["gpus"], visible_to(first["pid"])) == (["0"], "0")
    assert pool.worker("second/0")["pid"] == second["pid"]
    assert used(pool) == {"0": 1, "GPU-b": 1}


def test_a_model_has_the_gpus_that_it_names(pool: Pool) -> None:
    loaded(pool, "second")
    chosen = loaded(pool, "chosen")
    assert (chosen["gpus"], visible_to(chosen["pid"])) == (["GPU-b"], "GPU-b")
    unload(pool, "second")
    assert loaded(pool, "second")["gpus"] == ["2"], "its own has another worker now"
    assert used(pool) == {"0": 1, "GPU-b": 1, "2": 1}
    unload(pool, "chosen", "second")
    assert used(pool) == {"0": 1}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("elsewhere", ["'elsewhere'", "gpu_ids has 7, but", "may use are 0, GPU-b, 2, 3"]),
        ("large", ["devices is 5", "num_attention_heads 4", "set devices to a divisor of 4"]),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(pool: Pool, model: str, words: list[str]) -> None:
    with pool.client() as client:
        with pytest.raises(ModelLoadFailed) as caught:
            client.generate(model, "hi", max_tokens=1)
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert client.generate("first", "hi", max_tokens=3, seed=3).ids
    assert used(pool) == {"0": 1}


def busy(client: Client, streams: ExitStack) -> None:
    """Opens four long streams; a single worker cannot run all of them at once."""
    for seed in range(4):
        streams.enter_context(client.stream("scaled", "hi", max_tokens=10**6, seed=seed))


def test_workers_that_the_load_adds_have_gpus_of_their_own(pool: Pool) -> None:
    with pool.client() as client, ExitStack() as streams:
        busy(client, streams)
        until(lambda: len(used(pool)) == 4, "there are three workers more")
        assert used(pool) == {"0": 1, "GPU-b": 1, "2": 1, "3": 1}
    until(lambda: used(pool).total() == 2, "those that are not needed have ended")
    unload(pool, "scaled")
    assert used(pool) == {"0": 1}
