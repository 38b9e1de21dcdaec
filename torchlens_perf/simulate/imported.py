"""Ring files of ranks whose steps were recorded by torch.profiler or Nsight Systems.

The steps, their phases and collectives are found by the names that PyTorch gives its annotations.
The ring files, the sidecar and the run directory are those of a recorded run. What a profile lacks,
such as CPU contention, stays unmeasured.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torchlens_perf.config import Config
from torchlens_perf.errors import RunStoreError
from torchlens_perf.recorder import python
from torchlens_perf.recorder.session import Session
from torchlens_perf.run.clock import Anchor
from torchlens_perf.run.directory import create_ring
from torchlens_perf.run.ring import STEP, Flag, Kind
from torchlens_perf.simulate.rings import ManualClock, simulated_identity
from torchlens_perf.simulate.simulation import Topology

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.timeline.profiler_trace import ProfilerTrace
    from torchlens_perf.timeline.slices import Slice

DEFAULT_STEPS = (
    r"ProfilerStep#(\d+)|(?i:(?:train(?:ing)?[ _-]?)?(?:step|iter(?:ation)?))\b\W*(\d*)$"
)
_PHASES = {
    Kind.DATA: r"enumerate\(DataLoader\)|(?i:\W*(data|load)[ _-]?(load|batch|time)?\w*\W*$)",
    Kind.FORWARD: r"DistributedDataParallel\.forward$|(?i:\W*forward\W*$)",
    Kind.BACKWARD: r"torch/_tensor\.py\(\d+\): backward$|(?i:\W*backward\W*$)",
    Kind.OPTIMIZER: r"Optimizer\.step#|(?i:\W*(optimizer|optimizer[ _.-]?step)\W*$)",
}
_AUTOGRAD = r"autograd::engine::evaluate_function"
_MODULE = "nn.Module: "
_GLOO, _ISSUED = r"gloo:(\w+)", r"c10d::\w+_$"
_RING_RECORDS = 1 << 16
# Data types as profiles name them, as torch names them, and their bytes.
_DTYPES = {
    "float": ("float32", 4), "double": ("float64", 8), "half": ("float16", 2), "bfloat16": ("bfloat16", 2),
    "int": ("int32", 4), "long": ("int64", 8), "long int": ("int64", 8),
}  # fmt: skip


class ImportedSpan(NamedTuple):
    """A span of the training thread."""

    start_ns: int
    end_ns: int
    kind: Kind
    name: str


class ImportedCollective(NamedTuple):
    """A collective, from its issue or the start of its kernel to its end."""

    start_ns: int
    end_ns: int
    name: str
    size_bytes: int
    flags: Flag


@dataclasses.dataclass(frozen=True)
class ImportedStep:
    """A step and what was recorded in it."""

    number: int
    start_ns: int
    end_ns: int
    spans: list[ImportedSpan]
    collectives: list[ImportedCollective]
    memory_bytes: int
    """Peak of the allocator; 0: not measured."""


def find_steps(trace: ProfilerTrace, pattern: str = DEFAULT_STEPS) -> list[ImportedStep]:
    """Return the steps of a trace. Raise RunStoreError if it has none.

    pattern: regular expression for the names of steps. Its first group that matches is the number.
    """
    wanted = re.compile(pattern)
    thread, bounds = max(
        ((thread, [each for each in thread.slices if wanted.match(each.name)])
         for thread in trace.threads if not thread.on_device),
        key=lambda each: len(each[1]), default=(None, []),
    )  # fmt: skip
    if thread is None or not bounds:
        raise RunStoreError(
            f"{trace.path} has no steps: call profiler.step() in each step, or name the ranges that"
            " are steps by --steps PATTERN"
        )
    numbers = [_parse_number(wanted, each) for each in bounds]
    if None in numbers or len(set(numbers)) < len(numbers):
        numbers = list(range(len(bounds)))
    autograd = sorted(trace.select(_AUTOGRAD))
    collectives = sorted(_find_collectives(trace))
    found = []
    for number, step in zip(numbers, bounds, strict=True):
        inside = [each for each in thread.slices if _is_inside(each, step) and each is not step]
        own_collectives = [
            each for each in collectives if step.start_ns <= each.start_ns < step.end_ns
        ]
        ran = [each for each in autograd if _is_inside(each, step)]
        spans = _find_spans(inside, ran, own_collectives, step)
        held = [size for time_ns, size in trace.memory if step.start_ns <= time_ns < step.end_ns]
        found.append(ImportedStep(number or 0, step.start_ns, step.end_ns, spans, own_collectives,
                                  max(held, default=0)))  # fmt: skip
    return found


def _parse_number(wanted: re.Pattern[str], each: Slice) -> int | None:
    match = wanted.match(each.name)
    text = next((group for group in match.groups() if group), "") if match is not None else ""
    return int(text) if text.isdigit() else None


def _is_inside(each: Slice, outer: Slice) -> bool:
    return outer.start_ns <= each.start_ns and each.end_ns <= outer.end_ns


def _find_spans(
    inside: Sequence[Slice],
    autograd: Sequence[Slice],
    collectives: Sequence[ImportedCollective],
    step: Slice,
) -> list[ImportedSpan]:
    """Return phases and modules, in order of start. Spans nest."""
    patterns = {kind: re.compile(pattern) for kind, pattern in _PHASES.items()}
    phases: list[ImportedSpan] = []
    for each in inside:
        kind = next((kind for kind, of in patterns.items() if of.match(each.name)), None)
        # Of phases in each other, the outer one counts.
        if kind is not None and (not phases or each.start_ns >= phases[-1].end_ns):
            phases.append(ImportedSpan(each.start_ns, each.end_ns, kind, kind.name.lower()))
    kinds = {each.kind for each in phases}
    modules = [ImportedSpan(each.start_ns, each.end_ns, Kind.MODULE, each.name[len(_MODULE) :])
               for each in inside if each.name.startswith(_MODULE)]  # fmt: skip
    if Kind.FORWARD not in kinds:
        last_ns = 0
        for module in modules:
            if module.start_ns >= last_ns:
                phases.append(module._replace(kind=Kind.FORWARD, name="forward"))
                last_ns = module.end_ns
    if Kind.BACKWARD not in kinds:
        phases += _find_backward(inside, autograd, phases, collectives, step)
    waits = [each for phase in phases if phase.kind == Kind.BACKWARD
             for each in _find_waits(phase, autograd, collectives)]  # fmt: skip
    rank_of = {Kind.MODULE: 2, Kind.WAIT: 1}
    return sorted(
        phases + modules + waits,
        key=lambda each: (each.start_ns, -each.end_ns, rank_of.get(each.kind, 0)),
    )


def _find_backward(
    inside: Sequence[Slice],
    autograd: Sequence[Slice],
    phases: Sequence[ImportedSpan],
    collectives: Sequence[ImportedCollective],
    step: Slice,
) -> Iterator[ImportedSpan]:
    """Yield backward passes: functions of autograd without another phase between them.

    If a pass has issued collectives, it lasts until the training thread goes on, as the end of a
    pass of DDP has no annotation.
    """
    borders = sorted(each.start_ns for each in phases)
    for _, group in itertools.groupby(autograd, lambda each: bisect.bisect(borders, each.start_ns)):
        functions = list(group)
        start_ns, end_ns = functions[0].start_ns, max(each.end_ns for each in functions)
        if any(start_ns <= each.start_ns < end_ns for each in collectives):
            later = [each.start_ns for each in inside if each.start_ns >= end_ns]
            end_ns = min(later, default=step.end_ns)
        yield ImportedSpan(start_ns, end_ns, Kind.BACKWARD, "backward")


def _find_waits(
    phase: ImportedSpan, autograd: Sequence[Slice], collectives: Sequence[ImportedCollective]
) -> Iterator[ImportedSpan]:
    """Yield the time at the end of a backward pass in which only its collectives still run."""
    computed = [each.end_ns for each in autograd if phase.start_ns <= each.start_ns < phase.end_ns]
    running = [
        each.end_ns for each in collectives if phase.start_ns <= each.start_ns < phase.end_ns
    ]
    begin_ns, end_ns = max(computed, default=phase.end_ns), max(running, default=0)
    if begin_ns < min(end_ns, phase.end_ns):
        yield ImportedSpan(begin_ns, min(end_ns, phase.end_ns), Kind.WAIT, "wait")


def _find_collectives(trace: ProfilerTrace) -> Iterator[ImportedCollective]:
    """Yield collectives: kernels of NCCL, else calls of NCCL, and operations of gloo."""
    described = [each for each in trace.select("") if "Collective name" in each.arguments]
    kernels = [each for each in described if each.category == "kernel"]
    for each in kernels or described:
        facts = each.arguments
        dtype, item_bytes = _parse_dtype(facts.get("dtype"))
        group = facts.get("Process Group Name", "unknown")
        name = f"{facts['Collective name']} group={group} dtype={dtype}"
        size = int(facts.get("In msg nelems", 0)) * item_bytes
        flags = Flag.ASYNC | (Flag.COMPLETED | Flag.DEVICE if kernels else Flag(0))
        yield ImportedCollective(each.start_ns, each.end_ns, name, size, flags)
    groups = list(process_groups(trace))
    issued, ran = sorted(trace.select(_ISSUED)), sorted(trace.select(_GLOO))
    # An operation of gloo runs later than it was issued, on another thread.
    starts = [each.start_ns for each in (issued if len(issued) == len(ran) else ran)]
    for start_ns, each in zip(starts, ran, strict=True):
        dtype, item_bytes = _parse_dtype(next(iter(each.arguments.get("Input type", [])), None))
        elements = sum(_count_elements(shape) for shape in each.arguments.get("Input Dims", []))
        operation = each.name.partition(":")[2].replace("_", "")
        name = f"{operation} group={groups[0] if len(groups) == 1 else 'unknown'} dtype={dtype}"
        size = elements * item_bytes
        yield ImportedCollective(
            min(start_ns, each.start_ns), each.end_ns, name, size, Flag.ASYNC | Flag.COMPLETED
        )


def _parse_dtype(text: object) -> tuple[str, int]:
    """Return torch's name of a data type and the bytes of an element; 0 if unknown."""
    plain = str(text or "unknown").lower().removeprefix("c10::")
    return _DTYPES.get(plain, (plain.replace(" ", "_"), 0))


def _count_elements(shape: object) -> int:
    found = 1
    for size in shape if isinstance(shape, list) and shape else [0]:
        found *= size if isinstance(size, int) else _count_elements(size)
    return found


def process_groups(trace: ProfilerTrace) -> Mapping[str, tuple[list[int], str]]:
    """Return members and description of each process group by its name."""
    rows = (trace.header.get("distributedInfo") or {}).get("pg_config", [])
    return {str(row["pg_name"]): (list(row["ranks"]), str(row.get("pg_desc", ""))) for row in rows}


class _Recorder(python.Recorder):
    """A recorder whose steps may leave gaps."""

    def begin_step(self, number: int, start_ns: int) -> None:
        self.step = self._words[STEP] = number
        self._frames[0][0] = start_ns


class ImportedRank:
    """One rank with its ring file. close() closes both. Not thread-safe."""

    def __init__(
        self,
        run: RunDirectory,
        sidecar_host: str,
        rank: int,
        ranks: int,
        trace: ProfilerTrace,
        steps: Sequence[ImportedStep],
    ) -> None:
        """Create the ring file. ranks: size of the job."""
        begin_ns = steps[0].start_ns
        self.steps = steps
        self._clock = ManualClock(begin_ns)
        program = f"imported: {trace.path.name}"
        host = str(trace.header.get("host_name") or sidecar_host)
        identity = dataclasses.replace(
            simulated_identity(run, Topology(ranks, node_size=ranks), rank),
            program=program,
            host=host,
        )
        config = Config(ring_records=_RING_RECORDS, telemetry=False, capture="off", _build_tap=False,
                        exchange="off", report="off")  # fmt: skip
        ring = create_ring(
            run, identity, config.ring_capacity, first_step=steps[0].number, keep=True
        )
        # Times of records are Unix times.
        self._session = Session(
            config, identity, ring, self._clock, Anchor(begin_ns, begin_ns, 0), _Recorder
        )
        self._recorder: _Recorder = self._session.recorder  # type: ignore[assignment]
        self._sequences: dict[str, int] = {}
        for name, (members, description) in process_groups(trace).items():
            self._session.metadata.add_group(name, members, description)
        self._session.note(
            f"imported from {trace.path.name}: only what this profile has is measured, by the host's clock,"
            " and profiling made the steps longer"
        )
        run.register_ring(sidecar_host, ring.path)

    def write_step(self, step: ImportedStep) -> None:
        """Write the records of a step."""
        self._recorder.begin_step(step.number, step.start_ns)
        opened: list[ImportedSpan] = []
        for span in [*step.spans, None]:
            while opened and (span is None or opened[-1].end_ns <= span.start_ns):
                self._end(opened.pop())
            if span is not None:
                # Slices of different sources may overlap by some microseconds.
                end_ns = min([span.end_ns, *(each.end_ns for each in opened[-1:])])
                self._clock.now_ns = span.start_ns
                self._recorder.begin(span.kind, self._session.intern(span.name))
                opened.append(span._replace(end_ns=end_ns))
        for each in step.collectives:
            group = each.name.partition(" group=")[2].partition(" ")[0]
            number = self._sequences[group] = self._sequences.get(group, -1) + 1
            self._recorder.record_span(
                Kind.COLLECTIVE, self._session.intern(each.name), each.start_ns,
                each.end_ns - each.start_ns, int(each.flags), each.size_bytes, number,
            )  # fmt: skip
        self._clock.now_ns = step.end_ns
        self._recorder.next_step(0, step.memory_bytes, 1)

    def close(self) -> None:
        self._session.close({})

    def _end(self, span: ImportedSpan) -> None:
        self._clock.now_ns = span.end_ns
        self._recorder.end(span.kind, self._session.intern(span.name))
