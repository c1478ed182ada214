"""Tests which BLAS library a worker uses, and its behaviour without a fast one."""

from __future__ import annotations

import logging
import sys

import pytest

from mlxpool.worker.kernels import device

OPENBLAS = "/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3"


@pytest.mark.parametrize(
    ("platform", "preload", "blas"),
    [
        ("linux", OPENBLAS, OPENBLAS),
        ("linux", f"/lib/libtcmalloc.so:{OPENBLAS}", OPENBLAS),
        ("linux", f"/lib/a.so {OPENBLAS}", OPENBLAS),
        ("linux", "/lib/libtcmalloc.so", None),
        ("linux", "", None),
        ("darwin", "", "Accelerate"),
    ],
)
def test_the_blas_of_a_cpu(platform: str, preload: str, blas: str | None) -> None:
    assert device.blas_of(platform, preload) == blas


@pytest.mark.parametrize(
    ("configured", "sequences", "preload", "gpu", "chunk"),
    [
        (0, 8, "", False, 64),
        (0, 100, "", False, 200),
        (256, 8, "", False, 256),
        (0, 8, OPENBLAS, False, 0),
        (0, 8, "", True, 0),
    ],
)
def test_chunks_are_short_with_the_reference_blas(
    monkeypatch: pytest.MonkeyPatch,
    configured: int,
    sequences: int,
    preload: str,
    gpu: bool,
    chunk: int,
) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: gpu)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("LD_PRELOAD", preload)
    assert device.worker_chunk(configured, sequences) == chunk


def test_the_log_names_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(device, "on_gpu", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("LD_PRELOAD", OPENBLAS)
    device.log_device()
    assert [vars(record)["blas"] for record in caplog.records] == [OPENBLAS]
