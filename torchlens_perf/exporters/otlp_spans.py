"""Sampled steps as spans, encoded: one trace per step, and a deterministic id for each span.

The ids are derived from run, attempt and step, so the ranks' spans meet in one trace without talking to each other, and
a replay sends the same ids again.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage

from torchlens_perf.analysis.statistics.steps import kind_name
from torchlens_perf.exporters import ExportBatch, semantics
from torchlens_perf.exporters.delivery.wire import field, item, key_values, varint
from torchlens_perf.exporters.otlp_caller import link
from torchlens_perf.exporters.otlp_resource import encoded, rank_resource
from torchlens_perf.run.rank_ranges import ranges
from torchlens_perf.run.ring import Flag

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from torchlens_perf.run.identity import Identity
    from torchlens_perf.run.records import Span, StepTrace, TracedStep

_SAMPLER = "OTEL_TRACES_SAMPLER"
_TAKES_ALL = ("", "always_on", "parentbased_always_on")
# Of a Span: trace_id, span_id and parent_span_id are length-delimited, start and end 64 bits.
_TRACE_ID, _SPAN_ID, _PARENT_ID, _ATTRIBUTE = b"\x0a\x10", b"\x12\x08", b"\x22\x08", b"\x4a"
_TIMES = struct.Struct("<cQcQ")


def trace_id(run_id: str, attempt: int, step: int) -> int:
    """The id of a step's trace: the same on all ranks, and in a replay."""
    return _hash(16, run_id, attempt, step)


def span_id(in_trace: int, *path: object) -> int:
    """The id of a span in a trace, by its place in it."""
    return _hash(8, f"{in_trace:032x}", *path)


def _hash(size: int, *parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1


class SpanEncoder:
    """The spans of sampled steps, as they lie in a request. One thread."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        """Raises ValueError if OTEL_TRACES_SAMPLER_ARG cannot be used."""
        self._sampler = sampler(environ)
        self._ranks: dict[str, _RankEncoder] = {}

    def encode(self, batch: ExportBatch) -> tuple[bytes, dict[int, tuple[list[bytes], int, int]]]:
        """The encoded resource of the batch's rank; and by step its spans, its trace's id, and the id of its step span:
        where only the root is sent, of that."""
        if not batch.traces:
            return b"", {}
        rank = self._ranks.get(batch.identity.key)
        if rank is None or rank.identity != batch.identity:  # the run's name may be known later
            rank = self._ranks[batch.identity.key] = _RankEncoder(batch.identity)
        found: dict[int, tuple[list[bytes], int, int]] = {}
        steps = batch.steps
        of_steps = {
            step: {semantics.OWN_SECONDS: own_ns / 1e9, semantics.MICRO_STEPS: micro_steps}
            for step, own_ns, micro_steps in zip(
                steps.step.tolist(), steps.own_ns.tolist(), steps.micro_steps.tolist(), strict=True
            )
        }
        offset_ns = batch.anchor.unix_ns - batch.anchor.monotonic_ns
        for trace in batch.traces:
            in_trace = trace_id(batch.identity.run_id, batch.identity.attempt, trace.step)
            if self._takes(in_trace, trace):
                chosen = batch.chosen.get(trace.step)
                found[trace.step] = rank.encode(trace, in_trace, offset_ns, of_steps.get(trace.step, {}), chosen)
        return rank.resource, found

    def _takes(self, in_trace: int, trace: StepTrace) -> bool:
        """Whether OTEL_TRACES_SAMPLER takes the step's trace: all ranks decide alike, by its id."""
        if self._sampler is None:
            return True
        from opentelemetry.sdk.trace.sampling import Decision

        decision = self._sampler.should_sample(Context(), in_trace, _root_name(trace)).decision
        return decision is Decision.RECORD_AND_SAMPLE


def sampler(environ: Mapping[str, str]) -> Sampler | None:
    """The SDK's for the variables; None where it takes all steps, and the SDK need not be imported."""
    if environ.get(_SAMPLER, "").strip().lower() in _TAKES_ALL:
        return None
    from opentelemetry.sdk.trace import TracerProvider

    return TracerProvider(shutdown_on_exit=False).sampler


class _RankEncoder:
    """Encodes one rank's spans."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.resource = encoded(rank_resource(identity))
        self._links = b"".join(field(b"\x6a", each) for each in link(identity.traceparent, identity.tracestate))

    def encode(
        self,
        trace: StepTrace,
        in_trace: int,
        offset_ns: int,
        of_step: Mapping[str, Any],
        chosen: TracedStep | None = None,
    ) -> tuple[list[bytes], int, int]:
        """The step's spans, and the ids of its trace and of the rank's step span. offset_ns: from CLOCK_MONOTONIC to
        UNIX time. of_step: more attributes of that span. chosen: what is sent of the step; None: all of it."""
        rank, started_ns = self.identity.rank, trace.start_ns + offset_ns
        root_id, rank_id = span_id(in_trace, "root"), span_id(in_trace, rank)
        head = _TRACE_ID + in_trace.to_bytes(16, "big")
        common = _attributes({semantics.RUN_ID: self.identity.run_id, semantics.STEP: trace.step, semantics.RANK: rank})
        times = _times(started_ns, started_ns + trace.duration_ns)
        found = []
        if rank == 0:
            why = _attributes(_of_choice(chosen, self.identity.world_size))
            root = [head, _SPAN_ID, _id(root_id), times, _shape(_root_name(trace)), common, why, self._links]
            found.append(item(b"".join(root)))
        role = chosen.role(rank) if chosen is not None else ""
        if role is None:
            return found, in_trace, root_id
        kept = _kept(trace.spans, chosen.max_spans if chosen is not None else 0)
        if role:
            of_step = {**of_step, semantics.RANK_BECAUSE: role}
        if kept is not None:
            of_step = {**of_step, semantics.SPANS_LEFT_OUT: len(trace.spans) - len(kept)}
        ids = [head, _SPAN_ID, _id(rank_id), _PARENT_ID, _id(root_id), times]
        of_step = {semantics.SPAN_KIND: semantics.STEP_KIND, **of_step}
        found.append(item(b"".join([*ids, _shape(f"{semantics.SPAN_RANK} {rank}"), common, _attributes(of_step)])))
        # As span_id() for each, without hashing what all have in common anew.
        path = hashlib.sha256(f"{in_trace:032x}/{rank}/".encode())
        this_ids: list[bytes] = []
        in_rank = _id(rank_id)
        for index, (span, parent) in enumerate(nest(trace.spans)):
            if kept is not None and id(span) not in kept:
                # What lies in it lies in what is around it; the others' ids stay what they are.
                this_ids.append(in_rank if parent is None else this_ids[parent])
                continue
            digest = path.copy()
            digest.update(b"%d" % index)
            this_id = digest.digest()[:8]
            this_ids.append(this_id)
            begin_ns = span.start_ns + offset_ns
            rest = _rest(
                span.name or span.kind, span.kind, span.flags & _SHAPING, span.value0 if span.kind == "device" else 0
            )
            body = b"".join((
                head, _SPAN_ID, this_id, _PARENT_ID, in_rank if parent is None else this_ids[parent],
                _times(begin_ns, begin_ns + span.duration_ns), common, rest,
                _of_collective(span) if span.kind == "collective" else b"",
            ))  # fmt: skip
            found.append(b"\x12" + varint(len(body)) + body)
        return found, in_trace, rank_id


def _of_choice(chosen: TracedStep | None, world_size: int) -> dict[str, Any]:
    """What a root says of why the step is sent, and of what is not."""
    if chosen is None:
        return {}
    left_out = world_size - len(chosen.ranks) if chosen.roles else 0
    return {
        semantics.SAMPLED_BECAUSE: chosen.because,
        semantics.RANKS_SENT: ranges(chosen.ranks if chosen.roles else range(world_size)),
        semantics.RANKS_LEFT_OUT: left_out,
        semantics.STEPS_LEFT_OUT: chosen.left_out,
    }


def _kept(spans: Sequence[Span], most: int) -> set[int] | None:
    """Which objects among them are sent: the longest, which are phases and what takes most of them. None: all."""
    if not most or len(spans) <= most:
        return None
    return {id(span) for span in sorted(spans, key=lambda span: (-span.duration_ns, span.start_ns))[:most]}


_SHAPING, _OTHER_THREAD, _DEVICE = int(Flag.EXCEPTION | Flag.DEVICE), int(Flag.OTHER_THREAD), int(Flag.DEVICE)


@functools.lru_cache(maxsize=4096)
def _rest(name: str, kind: str, flags: int, value: int) -> bytes:
    """All of a span but its ids, times and what it shares with the step."""
    attributes: dict[str, Any] = {semantics.SPAN_KIND: kind}
    if kind == "device":
        attributes = {semantics.SPAN_KIND: kind_name(value), semantics.ON_DEVICE: True}
    elif kind == "collective" and flags & Flag.DEVICE:
        attributes[semantics.ON_DEVICE] = True
    status = b"\x7a\x02\x18\x02" if flags & Flag.EXCEPTION else b""  # Span.status.code is ERROR
    return _shape(name) + _attributes(attributes) + status


@functools.lru_cache(maxsize=1024)
def _shape(name: str) -> bytes:
    shape: bytes = SpanMessage(name=name, kind=SpanMessage.SpanKind.SPAN_KIND_INTERNAL).SerializeToString()
    return shape


def _of_collective(span: Span) -> bytes:
    return _BYTES(span.value0) + _SEQUENCE(span.value1 & 0xFFFFFFFF)


def _number(key: str) -> Callable[[int], bytes]:
    """Encodes an attribute whose value is a number that is not negative."""
    name = field(b"\x0a", key.encode())

    def encode(value: int) -> bytes:
        number = b"\x18" + varint(value)  # AnyValue.int_value
        return field(_ATTRIBUTE, name + field(b"\x12", number))

    return encode


_BYTES, _SEQUENCE = _number(semantics.BYTES), _number(semantics.SEQUENCE)


def _attributes(attributes: Mapping[str, Any]) -> bytes:
    return b"".join(field(_ATTRIBUTE, each.SerializeToString()) for each in key_values(attributes))


def _times(start_ns: int, end_ns: int) -> bytes:
    return _TIMES.pack(b"\x39", start_ns, b"\x41", end_ns)


def _id(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _root_name(trace: StepTrace) -> str:
    return semantics.SPAN_INFERENCE_STEP if trace.flags & Flag.INFERENCE else semantics.SPAN_STEP


def nest(spans: Sequence[Span]) -> list[tuple[Span, int | None]]:
    """Spans by start, each with the index of the smallest span that contains it; None: it lies in the step itself.

    Nothing on the training thread lies in a span of another thread or of the device: they only happen at the same
    time. A collective lies where it was issued, or where its kernel began on the device; it may last longer than what
    is around it, and nothing lies in it.
    """
    ordered = sorted(spans, key=_order)
    nested: list[tuple[Span, int | None]] = []
    running: list[tuple[int, int, int, int, bool]] = []  # what has not ended: end, duration, index, thread, device
    for index, span in enumerate(ordered):
        start_ns, duration_ns, flags = span.start_ns, span.duration_ns, span.flags
        is_collective, other_thread = span.kind == "collective", flags & _OTHER_THREAD
        on_device = span.kind == "device" or (is_collective and bool(flags & _DEVICE))
        end_ns = start_ns + duration_ns
        needed_ns = start_ns if is_collective else end_ns
        parent, shortest_ns, ended = None, -1, False
        for around in running:
            if around[0] < start_ns:
                ended = True
            elif (
                around[0] >= needed_ns
                and (other_thread or not around[3])
                and around[4] == on_device
                and (parent is None or around[1] <= shortest_ns)  # of equally long ones, the last is the innermost
            ):
                parent, shortest_ns = around[2], around[1]
        if ended:
            running = [around for around in running if around[0] >= start_ns]
        nested.append((span, parent))
        if not is_collective:
            running.append((end_ns, duration_ns, index, other_thread, on_device))
    return nested


def _order(span: Span) -> tuple[int, int, int]:
    return span.start_ns, -span.duration_ns, span.depth
