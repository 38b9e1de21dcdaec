"""Time the DataLoader: waits for the next batch, and starts of worker processes.

Waits for batches of Ray Data are timed, too, if the job has imported it before the watch begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.hooks.batch_size import BatchSize
from torchlens_perf.hooks.loader_workers import LoaderWorkersHook
from torchlens_perf.hooks.loop.passed_optimizers import create_reference
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched
from torchlens_perf.recorder.recorder import native_hook
from torchlens_perf.run.ring import Flag, Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_DATA, _EXCEPTION = int(Kind.DATA), int(Flag.EXCEPTION)
_RAY_BATCHES = "ray.data._internal.block_batching.iter_batches"


class DataHook:
    """Hook that patches the base class of DataLoader iterators, to also time existing iterators."""

    name = "data"

    def __init__(
        self,
        note_loader: Callable[[Any], bool] = lambda iterator: False,
        workers: LoaderWorkersHook | None = None,
    ) -> None:
        """note_loader: called with the iterator of each batch until it returns False."""
        self._note_loader: Callable[[Any], bool] | None = note_loader
        self._workers = workers or LoaderWorkersHook()

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        torch_private.require("torch.utils.data.dataloader._BaseDataLoaderIter")
        from torch.utils.data import DataLoader
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        recorder, hook = session.recorder, self
        data, workers = session.intern("data"), session.intern("data workers start")
        next_batch, start = _BaseDataLoaderIter.__next__, DataLoader.__iter__

        def timed_next(self: Any) -> Any:
            recorder.begin(_DATA, data)
            flags = 0
            try:
                batch = next_batch(self)
            except BaseException as error:
                flags = 0 if isinstance(error, StopIteration) else _EXCEPTION
                raise
            finally:
                recorder.end(_DATA, data, flags)
            handle_batch(self, batch)
            return batch

        @guard("size of a batch")
        def handle_batch(iterator: Any, batch: Any) -> None:
            if session.thread.is_current():
                with session.step.charged():
                    note_loader(iterator)
                    add_workload_of_batch(iterator, batch)
            else:
                add_workload_of_batch(iterator, batch)

        @guard("settings of a DataLoader")
        def note_loader(iterator: Any) -> None:
            note = hook._note_loader
            if note is not None:
                hook._workers.get_sampler = create_reference(iterator._index_sampler)
                hook._note_loader = note if note(iterator) else None

        @guard("size of a batch")
        def add_workload_of_batch(iterator: Any, batch: Any) -> None:
            # Count batches that a prefetching thread loads for the training thread. Do not count
            # batches of another thread that trains.
            if not (session.thread.is_current() or session.thread.reads_gradients):
                return
            if recorder.sampled:
                hook._workers.note_batch(iterator)
            size = BatchSize.of_batch(batch)
            if size is not None:
                session.step.add_workload(size.elements)
                if recorder.sampled:
                    session.step.add_batch(size.samples, are_tokens=size.are_tokens)

        def timed_iter(self: Any) -> Any:
            recorder.begin(_DATA, workers)
            began_ns, timed = recorder.now_ns(), hook._workers.begin_start(self)
            try:
                return start(self)
            finally:
                hook._workers.end_start(timed, self, session, recorder.now_ns() - began_ns)
                recorder.end(_DATA, workers)

        # The iterators of Ray Data are generators, whose __next__ cannot be replaced.
        ray_batches = getattr(sys.modules.get(_RAY_BATCHES), "BatchIterator", None)
        ray_wait = getattr(ray_batches, "get_next_batch_context", None)

        @contextmanager
        def timed_ray_wait(self: Any) -> Iterator[None]:
            recorder.begin(_DATA, data)
            try:
                with ray_wait(self):  # type: ignore[misc]
                    yield
            finally:
                recorder.end(_DATA, data)

        torch_private.break_graph_at(timed_next)
        torch_private.break_graph_at(timed_iter)
        patched_next = native_hook(
            "next_batch", timed_next, recorder, next_batch, data, add_workload_of_batch
        )
        with (
            patched(_BaseDataLoaderIter, "__next__", patched_next),
            patched(DataLoader, "__iter__", timed_iter),
            patched(ray_batches, "get_next_batch_context", timed_ray_wait)
            if ray_wait
            else nullcontext(),
        ):
            yield
