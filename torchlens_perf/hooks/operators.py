"""Count the floating-point operations of some sampled steps, with the native tap.

A RecordFunction callback (native/operators.h) receives each operator with its operands, on all
threads. It adds about 0.5 us to an operator, in counted steps only. Each counted step is at least
twice as late as the one before or 1024 steps later, and counting takes at most 0.05 % of the time.
torch.utils.flop_counter and the profiler cost over 20 times as much, and a model compiled before
runs uncompiled after the former (docs/internals/decisions/0049-operators-by-record-function.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torchlens_perf.errors import guard
from torchlens_perf.recorder import native_tap, torch_private
from torchlens_perf.run.operators import OperatorKey, Pass, Work, precision_of
from torchlens_perf.run.ring import OTHER_NAMES, Kind

if TYPE_CHECKING:
    from torchlens_perf.recorder.session import Session

NO_TAP = "the native tap is not built: run torchlens-perf build-tap"
_OPERATORS = int(Kind.OPERATORS)
_MAX_SHARE = 0.0005
_COST_NS = 500
"""Cost of the callback for one operator (benchmarks/operator_counts.py)."""
_MAX_PAUSE_STEPS = 1024
_MAX_NAMES = 16
"""Number of operators without a formula that are recorded by name."""


class OperatorHook:
    """Hook that counts operators in sampled steps. It needs the tap that CollectiveHook attaches."""

    name = "operators"

    @contextmanager
    def attach(self, session: Session) -> Iterator[None]:
        import torch

        tap = native_tap.load_tap()
        if not session.config.collectives:
            reason = "the setting collectives is off"
        elif tap is None:
            reason = NO_TAP
        else:
            reason = "this torch is a debug build" if torch.version.debug else ""
        session.facts.operators_missing = reason
        session.publish()
        if reason:
            yield
            return
        observer = _StepCounter(session, tap)
        session.step.set_observer(observer)
        try:
            yield
        finally:
            session.step.set_observer(None)
            observer.stop()


class _StepCounter:
    def __init__(self, session: Session, tap: Any) -> None:
        self._session = session
        self._tap = tap
        self._counting = False
        self._next_step = 0
        self._began_ns = 0

    @guard("counting operators")
    def begin_step(self, step: int) -> None:
        if step >= self._next_step:
            self._began_ns = self._session.recorder.now_ns()
            self._counting = True
            self._tap.start_counting()

    def stop(self) -> Any:
        self._counting = False
        return self._tap.stop_counting()

    @guard("counting operators")
    def end_step(self, samples: int, *, are_tokens: bool) -> None:
        if not self._counting:
            return
        session, recorder = self._session, self._session.recorder
        calls, operators_ns, counted, others = self.stop()
        now_ns = recorder.now_ns()
        pause = int(calls * _COST_NS / _MAX_SHARE / max(1, now_ns - self._began_ns))
        self._next_step = recorder.step + max(pause, min(recorder.step, _MAX_PAUSE_STEPS))

        def record(name_id: int, key: OperatorKey, took_ns: int, value0: int, value1: int) -> None:
            recorder.record_span(
                _OPERATORS, name_id, now_ns, took_ns, key.to_flags(), value0, value1
            )

        in_tf32 = _list_works_in_tf32() if session.metadata.computes_on("cuda") else ()
        for module, in_pass, work, dtype, flops, moved_bytes, _, took_ns in counted:
            precision = precision_of(dtype, tf32=work in in_tf32)
            key = OperatorKey(Pass(in_pass), Work(work), precision)
            record(module, key, took_ns, flops, moved_bytes)
        others.sort(key=lambda each: -each[2])
        rest = others[_MAX_NAMES:]
        if rest:
            others[_MAX_NAMES:] = [
                (OTHER_NAMES, sum(each[1] for each in rest), sum(each[2] for each in rest))
            ]
        key = OperatorKey(Pass.FORWARD, Work.OTHER, "other")
        for name, its_calls, took_ns in others:
            record(session.intern(name), key, took_ns, 0, its_calls)
        key = key._replace(work=Work.TOKEN_STEP if are_tokens else Work.STEP)
        record(0, key, operators_ns, samples + 1 if samples else 0, calls)


def _list_works_in_tf32() -> tuple[Work, ...]:
    """Return the kinds of work that CUDA devices do in TF32 if the operands are float32."""
    from torch import backends

    convolution = getattr(backends.cudnn, "conv", backends.cudnn)
    return (
        *((Work.PRODUCT,) if torch_private.runs_float32_in_tf32(backends.cuda.matmul) else ()),
        *((Work.CONVOLUTION,) if torch_private.runs_float32_in_tf32(convolution) else ()),
    )
