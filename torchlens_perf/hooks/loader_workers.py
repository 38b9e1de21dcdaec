"""Measure how long the workers of a DataLoader take for a batch, and count how often they start.

A rank whose loader is too slow may hardly wait for data: while it waits in communication for a rank
with an equally slow loader, its own batch becomes ready. Without the time that its workers need,
the other rank would be called slow (run/loader_period.py).

While a DataLoader starts its workers, the function that makes a batch is replaced. Workers that are
started by fork() inherit the replacement, and add their times to a page of memory that they share
with the training process. Other workers are not measured.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import torch_private
from torchlens_perf.recorder.patch import patched

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

_SLOTS, _WORDS, _WORD_BYTES = 256, 5, 8
_MIN_BATCHES = 8
# The time is published again if it has changed by this share.
_CHANGED = 0.1


class WorkerTimes:
    """Times of worker processes in shared memory. Each worker has a slot, chosen by its pid.

    They are sums over batches: their number, their wall time, the CPU time of all threads of the
    worker, and the wall time of the function that makes a batch of samples. Times are in ns. Wall
    time without CPU time is waiting, mostly for reads.
    """

    def __init__(self) -> None:
        self._words = memoryview(mmap.mmap(-1, _SLOTS * _WORDS * _WORD_BYTES)).cast("Q")

    @guard("time of a batch")
    def add_batch(self, *times: int) -> None:
        """Add the times of a batch of this process."""
        pid, words = os.getpid(), self._words
        place = pid % _SLOTS * _WORDS
        is_new = words[place] != pid
        words[place] = pid
        for word, value in enumerate((1, *times), place + 1):
            words[word] = value if is_new else words[word] + value

    def sum_up(self, pids: list[int]) -> list[int]:
        """Return the sums of these workers."""
        places = [
            pid % _SLOTS * _WORDS for pid in pids if self._words[pid % _SLOTS * _WORDS] == pid
        ]
        return [sum(self._words[place + word] for place in places) for word in range(1, _WORDS)]


class LoaderWorkersHook:
    """Hook that measures the workers of the loader from which steps take their first batch, and
    counts the starts of workers of the loader whose settings were read (training_settings.py).
    """

    name = "loader workers"

    def __init__(self) -> None:
        self.get_sampler: Callable[[], Any] = lambda: None
        """Returns the sampler of the loader whose starts are counted. Each loader has its own."""
        self._iterator: weakref.ref[Any] | None = None
        self._before, self._published_ns = (list[int](), list[int]()), 0
        self._batch_ns: tuple[int, ...] = ()
        self.times: WorkerTimes | None = None

    def note_batch(self, iterator: Any) -> None:
        """Keep a weak reference to the iterator of the first batch since the last reading."""
        if self._iterator is None:
            self._iterator = weakref.ref(iterator)

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher"):
            torch_private.require(f"torch.utils.data._utils.fetch.{name}.fetch")
        self.times = WorkerTimes()

        def publish() -> None:
            period_ns = self._read_period_ns()
            if abs(period_ns - self._published_ns) > _CHANGED * self._published_ns:
                self._published_ns = period_ns
                session.facts.loader_period_ns = period_ns
                self._replace_settings(session, worker_ns=self._batch_ns)
                session.publish()

        with session.run_throttled(self.name, publish):
            yield
        self.times = None

    @guard("timing a DataLoader's workers")
    def begin_start(self, loader: Any) -> ExitStack | None:
        """Replace the functions that make batches, if the loader may start workers."""
        if self.times is None or not loader.num_workers:
            return None
        from torch.utils.data._utils import fetch

        timed = ExitStack()
        for fetcher in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            timed.enter_context(patched(fetcher, "fetch", _timed_fetch(fetcher.fetch, self.times)))
        return timed

    @guard("timing a DataLoader's workers")
    def end_start(
        self, timed: ExitStack | None, loader: Any, session: Session, duration_ns: int
    ) -> None:
        """Put the functions back, and count the start. duration_ns: duration of `__iter__`."""
        if timed is None:
            return
        timed.close()
        known = session.facts.training.loader
        if known is not None and loader._index_sampler is self.get_sampler():
            restarts, restart_ns = known.restarts + 1, known.restart_ns + duration_ns
            with session.step.charged():
                self._replace_settings(session, restarts=restarts, restart_ns=restart_ns)
                session.publish()

    def _replace_settings(self, session: Session, **values: Any) -> None:
        """Change settings of the loader, if they have been read."""
        training = session.facts.training
        if training.loader is not None:
            loader = dataclasses.replace(training.loader, **values)
            session.facts.training = dataclasses.replace(training, loader=loader)

    def _read_period_ns(self) -> int:
        """Return the time in which all workers together make a batch; what was published before if
        there are too few batches."""
        iterator = self._iterator() if self._iterator is not None else None
        self._iterator = None
        pids = [worker.pid for worker in getattr(iterator, "_workers", ())]
        if not pids or self.times is None:
            return self._published_ns
        sums = self.times.sum_up(pids)
        last_pids, last = self._before
        newest = [a - b for a, b in zip(sums, last, strict=True)] if pids == last_pids else sums
        if newest[0] < _MIN_BATCHES * len(pids):
            return self._published_ns
        self._before, self._batch_ns = (pids, sums), tuple(each // newest[0] for each in newest[1:])
        return self._batch_ns[0] // len(pids)


def _timed_fetch(fetch: Callable[..., Any], times: WorkerTimes) -> Callable[..., Any]:
    from torch.utils.data import get_worker_info

    def timed_fetch(self: Any, indexes: Any) -> Any:
        if get_worker_info() is None:
            return fetch(self, indexes)
        if not isinstance(self.collate_fn, _TimedCollate):
            self.collate_fn = _TimedCollate(self.collate_fn)
        began_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
        # The end of an iterable dataset is no batch.
        batch = fetch(self, indexes)
        times.add_batch(
            time.perf_counter_ns() - began_ns,
            time.process_time_ns() - cpu_ns,
            self.collate_fn.duration_ns,
        )
        return batch

    return timed_fetch


class _TimedCollate:
    """The function of a worker that makes a batch of samples, with the duration of its last call."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate, self.duration_ns = collate, 0

    def __call__(self, samples: Any) -> Any:
        began_ns = time.perf_counter_ns()
        batch = self._collate(samples)
        self.duration_ns = time.perf_counter_ns() - began_ns
        return batch
