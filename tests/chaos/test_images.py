"""A worker that is killed at an image: the answer is that of an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.engine_faults import install_fault
from chaos.harness import LIMITS
from support import seeing_models as seeing
from support.pool import Pool

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

CONFIG = LIMITS.replace("load_limit = 1.5", "load_limit = 60").replace(
    "fresh_limit = 1.5", "fresh_limit = 60"
)
FILES = [seeing.file_of(seeing.picture(number)) for number in range(2)]
PROMPT = "one [img-0] two [img-1]" + " and so on" * 20
OPTIONS: dict[str, Any] = {"temperature": 0.8, "seed": 3, "max_tokens": 30, "ignore_eos": True}
# Ends the process once, where the file MARK does not exist yet, at the place that SITE names.
FAULT = """\
import os, signal

def end():
    try:
        os.close(os.open(os.environ["MARK"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def arm(engine):
    encode, submit, site = engine.encode, engine.submit, os.environ["SITE"]

    def encode_and_end(self, image, pinned):
        features = self._image_encoder(image)  # it is being encoded, and nothing is kept yet
        if site == "encode":
            end()
        del features
        encode(self, image, pinned)

    def submit_and_end(self, spans):
        fresh = submit(self, spans)
        for span in spans:
            media = span.sequence.media
            behind = media and not span.draws and span.start >= media[0].end
            if site == "prefill" and behind or site == "decode" and len(span.sequence.ids) == 9:
                end()
        return fresh

    engine.encode, engine.submit = encode_and_end, submit_and_end
"""


@pytest.mark.parametrize("write", [seeing.write_gemma, seeing.write_qwen, seeing.write_mllama])
@pytest.mark.parametrize("site", ["encode", "prefill", "decode"])
def test_a_kill_at_an_image_changes_nothing(
    tmp_path: Path, site: str, write: Callable[[Path], Path]
) -> None:
    mark = tmp_path / "struck"
    model = write(tmp_path / "eyes")
    config = f'{CONFIG}\n[models.eyes]\npath = "{model}"\nbatch = 32\n'
    environment = {**install_fault(tmp_path, FAULT), "MARK": str(mark), "SITE": site}
    with (
        Pool(tmp_path, config, environment=environment) as pool,
        pool.client(connect_timeout=60) as client,
    ):
        hit = client.generate("eyes", PROMPT, images=FILES, **OPTIONS)
        assert mark.exists(), "the worker was killed"
        assert hit.attempts == 2
        whole = client.generate("eyes", PROMPT, images=FILES, **OPTIONS)
        assert whole.attempts == 1
        assert hit.ids == whole.ids and len(hit.ids) == 30
        assert hit.text == whole.text
        assert hit.usage["prompt_tokens"] == whole.usage["prompt_tokens"]
