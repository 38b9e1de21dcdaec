"""Write the log of an MLPerf training result, with the step counts of a watch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchlens_perf.run.installation import require_packages

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session


class MlperfLog:
    """The log of one MLPerf result, which the compliance checker of MLCommons reads.

    Watch.mlperf() creates it, which writes init_start and the values of the submission. Only rank 0
    writes. Call the methods in this order: start(), then start_evaluation() and end_evaluation()
    for each evaluation.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        values: dict[str, Any],
        session: Session | None,
        count_samples: Callable[[], int] | None,
    ) -> None:
        require_packages("mlperf()", ["mlperf_logging"], "mlperf")
        from mlperf_logging.mllog import constants, mllog

        self._recorder = None if session is None else session.recorder
        self._batch_size = values["global_batch_size"]
        self._first_step, self._count_samples = 0, count_samples
        logger = logging.Logger("mlperf")
        if os.environ.get("RANK", "0") == "0":
            logger.addHandler(logging.FileHandler(path, mode="w"))
        # The lines have the user's file and line number.
        self._log, self._keys = mllog.MLLogger(logger, default_stack_offset=2), constants
        self._log.start(self._keys.INIT_START)
        for key, value in values.items():
            self._log.event(key, value)

    def start(self) -> None:
        """Start the clock of the run. Call this before the first batch is read."""
        self._first_step = self._recorder.training_steps if self._recorder is not None else 0
        self._log.end(self._keys.INIT_STOP)
        self._log.start(self._keys.RUN_START)
        self._log.start(self._keys.BLOCK_START, metadata=self._samples())

    def start_evaluation(self) -> None:
        """Write that an evaluation interrupts training."""
        self._log.end(self._keys.BLOCK_STOP, metadata=self._samples())
        self._log.start(self._keys.EVAL_START, metadata=self._samples())

    def end_evaluation(self, accuracy: float, status: str = "") -> None:
        """Write the result of an evaluation. With a status, "success" or "aborted", the run ends."""
        samples = self._samples()
        self._log.event(self._keys.EVAL_ACCURACY, accuracy, metadata=samples)
        self._log.end(self._keys.EVAL_STOP, metadata=samples)
        if status:
            self._log.end(self._keys.RUN_STOP, metadata={"status": status, **samples})
        else:
            self._log.start(self._keys.BLOCK_START, metadata=samples)

    def _samples(self) -> dict[str, int]:
        """Return the samples trained so far; {} if the watch records nothing."""
        if self._count_samples is not None:
            return {"samples_count": self._count_samples()}
        if self._recorder is None:
            return {}
        return {
            "samples_count": self._batch_size * (self._recorder.training_steps - self._first_step)
        }
