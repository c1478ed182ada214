"""A worker is killed while it processes an image: the answer equals that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.engine_faults import install_fault
from chaos.harness import WEIGHTS_LIMITS
from mlxpool.client import Client
from support import seeing_models as seeing
from support.pool import Pool

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

SITES = ("encode", "prefill", "decode")
# Each site has its own pictures, which no worker has encoded before.
FILES = {
    site: [seeing.file_of(seeing.picture(n).rotate(5 * number)) for n in range(2)]
    for number, site in enumerate(SITES)
}
PROMPT = "one [img-0] two [img-1]" + " and so on" * 20
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 30, "ignore_eos": True}
MODELS = {
    "gemma": seeing.write_gemma,
    "qwen": seeing.write_qwen,
    "mllama": seeing.write_mllama,
}
# Ends the process at the site that the file SITE names, and removes the file.
FAULT = """\
import os, signal

def end(site):
    path = os.environ["SITE"]
    try:
        if open(path).read() != site:
            return
    except OSError:
        return
    os.remove(path)
    os.kill(os.getpid(), signal.SIGKILL)

def arm(engine):
    encode, submit = engine.encode, engine.submit

    def encode_and_end(self, image, pinned):
        features = self.parts.image_encoder(image)  # it is being encoded, and nothing is kept yet
        end("encode")
        del features
        encode(self, image, pinned)

    def submit_and_end(self, spans):
        fresh = submit(self, spans)
        for span in spans:
            media = span.sequence.media
            if media and not span.draws and span.start >= media[0].end:
                end("prefill")
            if len(span.sequence.ids) == 9:
                end("decode")
        return fresh

    engine.encode, engine.submit = encode_and_end, submit_and_end
"""


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the file into which a test writes the phase in which the next worker ends."""
    return tmp_path_factory.mktemp("armed") / "site"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, armed: Path) -> Iterator[Client]:
    """A client of a pool with all models."""
    folder = tmp_path_factory.mktemp("pool")
    config = WEIGHTS_LIMITS + "".join(
        f'[models.{name}]\npath = "{write(folder / name)}"\nbatch = 32\n'
        for name, write in MODELS.items()
    )
    environment = {**install_fault(folder, FAULT), "SITE": str(armed)}
    with (
        Pool(folder, config, environment=environment) as pool,
        pool.client() as connected,
    ):
        yield connected


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("site", SITES)
def test_a_kill_at_an_image_changes_nothing(
    client: Client, armed: Path, site: str, name: str
) -> None:
    armed.write_text(site)
    hit = client.generate(name, PROMPT, images=FILES[site], **OPTIONS)
    assert not armed.exists(), "the worker was killed"
    assert hit.attempts == 2
    whole = client.generate(name, PROMPT, images=FILES[site], **OPTIONS)
    assert whole.attempts == 1
    assert hit.ids == whole.ids and len(hit.ids) == 30
    assert hit.text == whole.text
    assert hit.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
