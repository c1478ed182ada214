"""A pool's models: folders of all kinds, two names for one model, errors of broken folders."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.config.loading import load
from mlxpool.common.errors import PoolError
from mlxpool.worker.diagnose.check import check
from support.pool import Pool, until

pytest.importorskip("mlx.core")

from support.worker_checkpoints import write_checkpoint, write_json


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a models folder with a valid model, a copy of it, broken ones and a link to outside."""
    root = tmp_path_factory.mktemp("models")
    sound = write_checkpoint(root / "models" / "sound")
    shutil.copytree(sound, root / "models" / "org" / "copy")
    broken = shutil.copytree(sound, root / "models" / "broken")
    (broken / "model.safetensors").unlink()
    (broken / "tokenizer.json").unlink()
    nothing = shutil.copytree(sound, root / "models" / "nothing")
    (nothing / "config.json").write_text("\0")
    (root / "old.gguf").write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(16))
    write_checkpoint(root / "outside")
    (root / "models" / "link").symlink_to(root / "outside")
    return root / "models"


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Pool]:
    config = f"""
[pool]
models_dir = "{models}"
[models.alias]
path = "{models / "sound"}"
[models.short]
path = "{models / "sound"}"
context = 64
[models.gguf]
path = "{models.parent / "old.gguf"}"
[models.kept]
path = "builtin:counting"
pin = true
"""
    with Pool(tmp_path_factory.mktemp("pool"), config) as running:
        yield running


def names(pool: Pool) -> set[str]:
    return {m["name"] for m in pool.ask("models")["models"]}


def put_in_place(made: Path, models: Path) -> None:
    """Moves a finished folder into `models`: the pool must not see a half-written folder."""
    made.rename(models / made.name)


def looked_at(pool: Pool, name: str) -> dict[str, Any]:
    """Returns the row of a model after the inspection of its files."""

    def found() -> dict[str, Any] | None:
        row = next(m for m in pool.ask("models")["models"] if m["name"] == name)
        return row if row["type"] or row["error"] else None

    return dict(until(found, f"{name} was looked at"))


def refused(pool: Pool, name: str) -> PoolError:
    with pool.client() as client, pytest.raises(PoolError) as caught:
        client.generate(name, "x", max_tokens=1)
    return caught.value


def test_every_folder_is_listed_as_a_model(pool: Pool) -> None:
    wanted = {
        "demo", "demo-chat", "demo-embed", "counting", "kept", "alias", "short",
        "sound", "org/copy", "broken", "nothing", "link", "gguf",
    }  # fmt: skip
    # An answer may lack models: it waits only for a limited time.
    until(lambda: wanted <= names(pool), "all are found")
    assert names(pool) == wanted


def test_the_row_of_a_model_that_was_never_loaded(pool: Pool) -> None:
    row = looked_at(pool, "short")
    assert (row["state"], row["type"], row["context"]) == ("cold", "llama", 64)
    assert (row["quantisation"], row["error"], len(row["digest"])) == ("f32", None, 12)
    assert row["size"] > 0 and "tree" in row["features"]
    with pool.client() as client:
        assert row in client.models()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "broken has no "),
        ("nothing", "is not JSON"),
        ("link", "leads out of the models folder"),
        ("gguf", "version 1"),
    ],
)
def test_a_broken_model_fails_alone_with_the_message_of_check(
    pool: Pool, name: str, words: str
) -> None:
    row = looked_at(pool, name)
    assert row["state"] == "failed" and words in row["error"]
    error = refused(pool, name)
    assert (error.code, error.message) == ("model_load_failed", row["error"])
    assert check(name, load(pool.config).models[name])["problems"][0] == error.message
    assert not any(worker["slot"].startswith(name) for worker in pool.ask("ps")["workers"])


def test_names_of_one_folder_share_a_worker_and_those_with_other_settings_do_not(
    pool: Pool,
) -> None:
    with pool.client() as client:
        first = client.generate("alias", "hello", max_tokens=4, temperature=0)
        second = client.generate("sound", "hello", max_tokens=4, temperature=0)
    assert first.ids == second.ids
    slots = {w["slot"]: w for w in pool.ask("ps")["workers"]}
    assert "alias/0" in slots and "sound/0" not in slots
    shares = {m["name"]: m["shares"] for m in pool.ask("models")["models"]}
    assert (shares["sound"], shares["alias"], shares["short"]) == ("alias", None, None)


def test_a_copy_shares_once_its_digest_is_known(pool: Pool) -> None:
    def shares() -> Any:
        return next(m for m in pool.ask("models")["models"] if m["name"] == "org/copy")["shares"]

    assert until(shares, "the copy is known to be one") == "alias"
    with pool.client() as client:
        assert len(client.generate("org/copy", "x", max_tokens=2, ignore_eos=True).ids) == 2


def test_a_new_folder_is_found_when_models_are_listed(
    pool: Pool, models: Path, tmp_path: Path
) -> None:
    assert refused(pool, "later").code == "unknown_model"
    put_in_place(write_checkpoint(tmp_path / "later", seed=5), models)
    until(lambda: "later" in names(pool), "it is found")
    with pool.client() as client:
        assert len(client.generate("later", "x", max_tokens=2, ignore_eos=True).ids) == 2


def test_a_repaired_model(pool: Pool, models: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "mended")
    settings = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**settings, "rms_norm_eps": None})
    put_in_place(folder, models)
    until(lambda: "mended" in names(pool), "it is found")
    assert "rms_norm_eps" in looked_at(pool, "mended")["error"]
    write_json(tmp_path / "config.json", {**settings, "rms_norm_eps": 1e-6})
    (tmp_path / "config.json").replace(models / "mended" / "config.json")
    # This client does not list the models: the request causes the new inspection.
    with pool.client() as client:

        def answers() -> bool:
            try:
                return len(client.generate("mended", "x", max_tokens=2, ignore_eos=True).ids) == 2
            except PoolError as error:
                assert error.code == "model_load_failed"
                return False

        until(answers, "the change was seen")
    assert looked_at(pool, "mended")["error"] is None


@pytest.mark.parametrize("name", ["../models/sound", "sound/../broken", "a\0b", "x" * 10_000])
def test_a_name_is_never_a_path(pool: Pool, models: Path, name: str) -> None:
    assert refused(pool, name).code == "unknown_model"
    assert refused(pool, str(models / "sound")).code == "unknown_model"


def test_a_pinned_model_is_loaded_at_start_and_reloaded(pool: Pool) -> None:
    first = pool.in_state("kept/0", state="ready")["pid"]
    os.kill(first, signal.SIGKILL)
    until(
        lambda: pool.worker("kept/0")["state"] == "ready" and pool.worker("kept/0")["pid"] != first,
        "it is there again",
    )


def test_the_table(pool: Pool) -> None:
    looked_at(pool, "broken")
    text = pool.cli("models").stdout
    assert "QUANTISATION" in text and "broken cannot be had:" in text
    assert "sound shares the workers of alias" in text


def test_check_of_a_sound_model(pool: Pool, models: Path) -> None:
    broken = pool.cli("check", "broken", "--config", str(pool.config))
    assert broken.returncode == 1 and "2 problems:" in broken.stdout
    report = pool.cli_json("check", str(models / "sound"), "--context", "100")
    assert report["problems"] == [] and report["memory"]["context"] == 100
    text = pool.cli("check", "short", "--config", str(pool.config)).stdout
    assert "nothing is wrong with it" in text and "with 64 tokens" in text
    unknown = pool.cli("check", "nobody")
    assert unknown.returncode == 2 and "no model 'nobody'" in unknown.stderr
