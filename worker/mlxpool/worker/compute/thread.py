"""The compute thread: loads the model, runs the loop, reports its end.

It waits for the main thread only if the queue of deltas is full (phase `blocked`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mlxpool.common.config.schema import ModelConfig, WorkerConfig
from mlxpool.common.errors import Internal, ModelLoadFailed
from mlxpool.worker.compute import encoder_loop, model_source
from mlxpool.worker.compute.drafting_rows import make_speculator
from mlxpool.worker.compute.encoder_loop import EncoderLoop
from mlxpool.worker.compute.generations import Generation
from mlxpool.worker.compute.loop import BeginGeneration, ComputeLoop
from mlxpool.worker.compute.messages import (
    DeltaQueue,
    DiskNews,
    Inbound,
    Loaded,
    Outbound,
    Unusable,
)
from mlxpool.worker.compute.model_source import EncoderSource, ModelSource
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import DeviceLost
from mlxpool.worker.prefix_disk.folder import DiskSettings
from mlxpool.worker.system import load_clock
from mlxpool.worker.system.cpu_threads import CpuThreads, process_cpu_threads

log = logging.getLogger("mlxpool.worker")

ENCODER_SEQUENCES = 1  # encoder models run no sequences; the first `credit` only means "ready"


Source = ModelSource | EncoderSource


class Compute(threading.Thread):
    """The thread that loads and runs the model; no other thread uses MLX.

    Other threads give it messages by `send`. It passes its own messages to the function `post`.
    """

    def __init__(
        self,
        config: WorkerConfig,
        progress: Progress,
        post: Callable[[Outbound], None],
        open_source: Callable[[ModelConfig], Source] = model_source.open_source,
        begin: BeginGeneration = Generation.begin,
    ) -> None:
        super().__init__(name="compute", daemon=True)
        self.config = config
        self.progress = progress
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.delta_queue = DeltaQueue(post, progress)
        self._post = post
        self._open_source = open_source
        self._begin = begin
        self._cpu_threads = process_cpu_threads()  # created before other threads ask for a core
        self._ended_by: BaseException | None = None

    def send(self, message: Inbound) -> None:
        """Puts a message into the thread's queue. Any thread may call it."""
        self.inbox.put(message)

    def run(self) -> None:
        self.progress.compute_begins()
        try:
            loop = self._load()
        except BaseException as error:  # the broker needs a reason for any error
            stack = not isinstance(error, ModelLoadFailed)  # ModelLoadFailed has the remedy
            log.error("the model cannot be served", extra={"why": str(error)}, exc_info=stack)
            self.progress.enter("unload")
            self._post(Unusable(model_source.as_load_error(error, self.config.name)))
            return
        try:
            loop.run()
        except DeviceLost as error:
            self.progress.block.write_request(error.request)  # the broker blames this request
            self._end(error, str(error))
        except BaseException as error:
            self._end(error, f"the compute thread ended: {error!r}")

    def _load(self) -> ComputeLoop | EncoderLoop:
        self.progress.enter("load")
        load_clock.LOAD.enter("check")
        source = self._open_source(self.config.model)
        self._post(source.opened)
        load_clock.LOAD.enter("device")
        if isinstance(source, EncoderSource):
            return self._load_encoder(source)
        engine = source.load(partial(self._loaded_so_far, source.weight_bytes))
        speculator = make_speculator(self.config.model.speculation, engine, self.config.name)
        self.progress.loaded = 1.0
        load_clock.LOAD.enter("warm_up")
        engine.warm_up(self.progress.moved)
        self.progress.layout = engine.layout
        model = self.config.model
        if model.prefix_disk:
            root = Path(self.config.prefix_dir)
            settings = DiskSettings(root, self.config.name, model.prefix_disk)
            engine.open_disk(settings, lambda: self.inbox.put(DiskNews()))
        cpu_threads = self._cpu_threads if engine.yields_cores else CpuThreads(None, 1)
        loop = ComputeLoop(
            engine,
            source.max_sequences,
            self.inbox,
            self.delta_queue,
            self.progress,
            cpu_threads,
            self._post,
            self._begin,
            speculator,
        )
        load_clock.LOAD.enter("preparers")
        self._post(Loaded(source.max_sequences))
        return loop

    def _load_encoder(self, source: EncoderSource) -> EncoderLoop:
        encoder = source.load(partial(self._loaded_so_far, source.weight_bytes))
        self.progress.loaded = 1.0
        load_clock.LOAD.enter("warm_up")
        encoder.warm_up(self.progress.moved)
        self.progress.layout = encoder_loop.LAYOUT
        cpu_threads = self._cpu_threads if encoder.yields_cores else CpuThreads(None, 1)
        loop = EncoderLoop(
            encoder, self.inbox, self.delta_queue, self.progress, cpu_threads, self._post
        )
        load_clock.LOAD.enter("preparers")
        self._post(Loaded(ENCODER_SEQUENCES))
        return loop

    def _loaded_so_far(self, whole: int, tensors: int, size: int) -> None:
        """Report that `size` of `whole` bytes of weights are loaded."""
        self.progress.moved()
        self.progress.loaded = min(1.0, size / whole) if whole else 0.0
        self.progress.memory.loaded(size)

    def _end(self, error: BaseException, what: str) -> None:
        """Logs an error that ends the thread, and posts Unusable, so that the worker process ends.

        The broker counts this as a crash, and the streams continue in other workers.
        """
        # Keeps the error, whose traceback keeps the engine alive: on a lost device, freeing memory
        # may end the process before it has sent the reason.
        self._ended_by = error
        log.critical(what, exc_info=error)
        self.progress.enter("unload")
        self._post(Unusable(Internal(what)))
