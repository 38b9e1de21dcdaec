"""Sentences on a hang: how long it lasts, which ranks wait for which, where they are, and what to
do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import structs

from torchlens_perf.analysis.collectives.device_progress import LastDeviceMark, RankProgress
from torchlens_perf.analysis.collectives.hang import (
    WAIT,
    BlockingRank,
    Collective,
    Hang,
)
from torchlens_perf.analysis.statistics.quantities import format_duration, format_percent
from torchlens_perf.run.clock import DeviceMark
from torchlens_perf.run.grouping import group_values
from torchlens_perf.run.rank_ranges import format_rank_list
from torchlens_perf.run.ring import Kind
from torchlens_perf.verdicts.kinds import past_kind
from torchlens_perf.verdicts.verdict import WORTH_A_LINE, Evidence, RunLength, Verdict
from torchlens_perf.verdicts.verdict import RankStack as RankStack

# The largest numbers of ranks with hosts, of places, of nested spans, and of ranges that a text lists.
_MAX_NAMED, _MAX_PLACES = 4, 6
_MAX_SPANS, _MAX_RANGES = 6, 8


class HangEvidence(Evidence, frozen=True, tag="hang"):
    """A hang, with its clauses. `ranks` are the blocking ones; see Hang for the other fields."""

    kinds = "hang", past_kind("hang")
    paid_once_of = "all step time"
    kind: str
    since_s: float
    step: int
    waiting: tuple[int, ...]
    stacks: Mapping[int, RankStack]
    """Python stacks of a few relevant ranks, by rank."""

    opening: str
    """How long no step was finished, as the beginning of a sentence."""
    finding: str
    """Which ranks wait for which, in sentences."""
    action: str = ""
    """The action to take."""
    went_on: bool | None = None
    """For a hang that has ended, true if later steps were finished; None if that is not known."""
    places: tuple[str, ...] = ()
    """Texts such as "ranks 0,2-7: allreduce 57 of group 0, train.py:57 in main", one for each group of
    ranks."""
    witnesses: tuple[str, ...] = ()
    """Sentences on what PyTorch's Flight Recorder and NCCL's RAS service have recorded."""
    nccl_status: str = ""
    """The answer of NCCL's RAS service; "" without one."""

    def describe(self, verdict: Verdict) -> list[str]:
        where, share = _capitalize("; ".join(self.places)), verdict.cost_share or 0.0
        first, *others = self.explain(verdict)
        if self.went_on and share >= WORTH_A_LINE:
            first = f"{first.removesuffix('.')}: {format_percent(share)} of all step time."
        return [first, *others, where and f"{where}."]

    def explain(self, verdict: Verdict) -> list[str]:
        if verdict.kind == "hang":
            return [f"{self.opening}.", self.finding, *self.witnesses]
        lasted = f" for {format_duration(self.since_s)}" if self.since_s else ""
        then = {True: ", and then continued", False: ", and did not continue", None: ""}[
            self.went_on
        ]
        return [
            f"The job hung in step {self.step}{lasted}{then}.",
            self.finding,
            *self.witnesses,
        ]

    def compute_lost_s(self, verdict: Verdict, run: RunLength) -> float | None:
        return self.since_s

    @property
    def stops_run(self) -> bool:
        return self.went_on is False


def build_hang_verdict(hang: HangEvidence) -> Verdict:
    return Verdict(
        kind="hang",
        rank=hang.ranks[0] if hang.ranks else None,
        cost_s_per_step=0.0,
        cost_share=0.0,
        lost_s=hang.since_s,
        since_step=hang.step,
        confidence=0.9,
        action=hang.action,
        evidence=hang,
    )


def build_ended_hang_verdict(
    hang: HangEvidence, *, went_on: bool | None, steps: int, total_s: float
) -> Verdict:
    """Return a verdict on a hang that has ended.

    went_on: True if later steps were finished. steps, total_s: number and time of all steps of the
    run.
    """
    share = hang.since_s / max(total_s, hang.since_s) if hang.since_s else 0.0
    is_worth = went_on is False or (went_on and share >= WORTH_A_LINE)
    return structs.replace(
        build_hang_verdict(structs.replace(hang, went_on=went_on)),
        kind=past_kind("hang"),
        cost_s_per_step=hang.since_s / max(1, steps),
        cost_share=share,
        action=hang.action if is_worth else "",
    )


def describe_hang(
    hang: Hang,
    stacks: Mapping[int, RankStack],
    user_lines: Mapping[int, str],
    witnesses: tuple[str, ...] = (),
    nccl_status: str = "",
) -> HangEvidence:
    """Return the hang with its sentences. Values that only the sentences contain are left out.

    user_lines: for some ranks, the line of the user's code, such as "train.py:65".
    witnesses, nccl_status: see HangEvidence.
    """
    usual = (
        f"usually {format_duration(hang.usual_s)}"
        if hang.usual_s > 0
        else "the usual time is not known yet"
    )
    opening = f"No step for {format_duration(hang.since_s)} ({usual})"
    if hang.moving:
        there = sorted({rank for ranks in hang.places.values() for rank in ranks})
        opening += (
            f" on {format_ranks(there)}, while"
            f" {_format_count(len(hang.moving), 'other rank makes', 'other ranks make')} steps"
        )
    if hang.operations and hang.collective:
        finding = describe_different_calls(hang, hang.collective)
    else:
        finding = _FINDINGS.get(hang.kind, _describe_blocking_ranks)(hang)
    return HangEvidence(
        hang.kind,
        hang.since_s,
        hang.step,
        hang.waiting,
        stacks,
        opening,
        " ".join([finding, *_additional_sentences(hang)]),
        _next_action(hang, user_lines),
        places=_list_places(hang, user_lines),
        witnesses=witnesses,
        nccl_status=nccl_status,
        ranks=tuple(each.progress.rank for each in hang.blocking),
        cause=hang.kind,
    )


def collective_name(collective: Collective) -> str:
    """Return the name of a collective, such as "allreduce 57 of group 0"."""
    return (
        f"{collective.operation or 'collective'} {collective.sequence} of group {collective.group}"
    )


def open_spans_phrase(inside: Sequence[str]) -> str:
    """Return a phrase with the open spans of a rank, such as "inside backward > wait"."""
    names = list(inside)
    if len(names) > _MAX_SPANS:
        names[2 : 3 - _MAX_SPANS] = ["..."]
    return f"inside {' > '.join(names)}" if names else "in code outside all phases and sections"


# The most serious problem of the blocking ranks determines the kind of a hang. Ranks with the most
# serious problem are listed first, and the advised action is about them.
_GRAVE = {"stopped": ("stopped", "traced"), "missing": ("stuck",), "uneven": ("closed",)}


# -- the finding


def _describe_blocking_ranks(hang: Hang) -> str:
    waits = ""
    if hang.waiting:
        waits = _format_count(len(hang.waiting), "rank waits", "ranks wait")
        waits += f" in {collective_name(hang.collective)}; " if hang.collective else "; "
    clauses: dict[str, list[BlockingRank]] = {}
    for blocking in sorted(hang.blocking, key=lambda each: not _has_main_problem(each, hang)):
        clauses.setdefault(_blocking_rank_clause(blocking, hang), []).append(blocking)
    named = [
        f"{_name_ranks_with_hosts(blocking_ranks)} {clause}"
        for clause, blocking_ranks in list(clauses.items())[:_MAX_NAMED]
    ]
    rest = sum(len(blocking_ranks) for blocking_ranks in list(clauses.values())[_MAX_NAMED:])
    if rest:
        named.append(f"{_format_count(rest, 'more rank is', 'more ranks are')} missing")
    found = waits + "; ".join(named) + "."
    missing = sum(blocking.missing == hang.collective for blocking in hang.blocking)
    if hang.kind == "missing" and hang.collective and 2 * len(hang.waiting) <= missing:
        found += f" Or only {format_ranks(hang.waiting)} should not have entered it."
    return _capitalize(found)


def _blocking_rank_clause(blocking: BlockingRank, hang: Hang) -> str:
    """Return a clause on a blocking rank. The clause fits one or several ranks."""
    each = blocking.progress
    missing = "entered every collective that others have"
    if blocking.missing:
        missing = (
            "did not enter"
            f" {'it' if blocking.missing == hang.collective else collective_name(blocking.missing)}"
        )
    waits = each.inside[-1:] == (WAIT,)
    where = open_spans_phrase(each.inside[:-1] if waits else each.inside)
    if waits:
        where += (
            ", waiting in an operation that all ranks have entered"
            if blocking.missing
            else ", waiting"
        )
    work = _describe_other_work(each)
    old = f", as reported {format_duration(each.report_age_s)} ago" if each.report_age_s > 0 else ""
    return {
        "dead": f"died {where}, and {missing}",
        "stopped": f"{missing}: stopped by a signal (process state T) {where}",
        "traced": f"{missing}: held by a debugger (process state t) {where}",
        "silent": (
            f"stopped reporting when the steps ended, {format_duration(each.report_age_s)} ago, as did the"
            f" sidecar of that node; last reported {where}, and {missing}"
        ),
        "closed": f"{missing}: recording ended normally there after {each.step} steps",
        "busy": f"{missing}: {work or 'running '}{where}, last recorded event {format_duration(each.quiet_s)} ago",
    }.get(
        blocking.problem,
        f"{missing}{':' if work else ','} {work}last {where}{old}"
        + (f", waiting for its device in {each.waits_in}" if each.waits_in else ""),
    )


def _describe_other_work(each: RankProgress) -> str:
    """Return a clause on a rank that saves or evaluates instead of training; "" otherwise."""
    if _is_saving(each):
        return "it saves a checkpoint, "
    if each.evaluates:
        return (
            f"it made {each.passes} forward passes without a backward pass, as in an evaluation, "
        )
    return ""


def _is_saving(each: RankProgress) -> bool:
    return "torch.save" in each.inside


_DIFFERENCES = {
    "operations": "the calls differ",
    "order": "the order differs",
    "sizes": "the sizes differ",
    "dtypes": "the data types differ",
}


_SAME = {
    "sizes": ", with the same sizes",
    "dtypes": ", with the same data types (autocast, model.half(), a loaded checkpoint)",
}


def describe_different_calls(hang: Hang, collective: Collective) -> str:
    calls = [
        f"{format_ranks(ranks)} called {operation}"
        for operation, ranks in sorted(hang.operations.items(), key=lambda item: item[1])
    ]
    number = f"{collective.sequence} of group {collective.group}"
    return (
        f"{_capitalize(', '.join(calls))} as collective {number}: {_DIFFERENCES[hang.difference]}."
    )


def _describe_mismatch(hang: Hang) -> str:
    following = [rank for rank, _ in hang.cycle[1:]] + [rank for rank, _ in hang.cycle[:1]]
    steps = zip(hang.cycle, following, strict=True)
    waits = [
        f"rank {rank} waits in {collective_name(where)} for rank {other}"
        for (rank, where), other in steps
    ]
    shown = waits if len(waits) <= _MAX_NAMED else [*waits[: _MAX_NAMED - 1], "...", waits[-1]]
    return f"Ranks wait for each other in a cycle: {', '.join(shown)}."


def _describe_entered_by_all(hang: Hang) -> str:
    count = "Both" if len(hang.waiting) == 2 else f"All {len(hang.waiting)}"
    found = f"{count} ranks wait, but no record shows for what."
    if hang.collective is not None:
        name = collective_name(hang.collective)
        found = f"{count} ranks have entered {name}: no rank keeps the others waiting."
    return f"{found} {_why_no_device_is_named(hang)}".rstrip()


def _why_no_device_is_named(hang: Hang) -> str:
    """Return a sentence on why no slow device is named; "" without devices."""
    devices = hang.devices
    if devices is None:
        return ""
    if devices.kind == "level":
        place = next(iter(devices.places.values()))
        return (
            f"Their devices are at the same place, {_device_place_phrase(place)}, so no device is behind"
            " the others. "
        )
    return (
        "It is not known which device is behind: the training threads were blocked before they"
        " could check. "
    )


def _describe_slow_devices(hang: Hang) -> str:
    devices = hang.devices
    assert devices is not None
    live = sorted({rank for ranks in hang.places.values() for rank in ranks})
    others = [rank for rank in live if rank not in devices.ranks]
    entered = (
        f"{_capitalize(format_ranks(live))} have entered every collective that the others have"
    )
    if hang.collective:
        entered = (
            f"{_capitalize(format_ranks(live))} have entered {collective_name(hang.collective)}"
        )
    one = len(devices.ranks) == 1
    who = f"the {'device' if one else 'devices'} of {_name_ranks_with_hosts(hang.blocking)}"
    if devices.kind == "kernel":
        begun = f"the operation's kernel has not begun, although it has on {format_ranks(others)}"
        return f"{entered}, but on {who} {begun}: an earlier kernel does not end there."
    here = devices.places[devices.ranks[0]]
    furthest = max(
        (devices.places[rank] for rank in others), key=lambda each: (each.step, each.place)
    )
    verb = "is" if one else "are"
    return (
        f"{entered}, but {who} {verb} {_device_place_phrase(here)}, while the furthest device of"
        f" {format_ranks(others)} is {_device_place_phrase(furthest)}."
    )


def _device_place_phrase(place: LastDeviceMark) -> str:
    return f"in step {place.step} after {place.mark or f'mark {place.place}'}"


def _describe_missing_reports(hang: Hang) -> str:
    where = (
        f" in {collective_name(hang.collective)} or a later operation" if hang.collective else ""
    )
    return (
        f"{_format_count(len(hang.waiting), 'rank waits', 'ranks wait')}{where}; the cause is on the ranks"
        " without reports."
    )


def _describe_single_rank(hang: Hang) -> str:
    (blocking,) = hang.blocking
    who = _capitalize(_name_ranks_with_hosts([blocking]))
    return f"{who} is {open_spans_phrase(blocking.progress.inside)}, and no rank waits for it."


def _describe_blocked_threads(hang: Hang) -> str:
    devices = hang.devices
    assert devices is not None
    stacks = f"{'stack' if len(devices.asked) == 1 else 'stacks'} of {format_ranks(devices.asked)}"
    return (
        f"The training threads wait for their devices, in {devices.waits_in},"
        f" by the {stacks}. It is not known what the devices execute: the threads last checked them"
        " before they began to wait. One device may be stuck in a kernel of its own while the"
        " others wait for it in a collective, or all devices may execute long work. The records"
        " cannot distinguish these cases."
    )


_FINDINGS: dict[str, Callable[[Hang], str]] = {
    "mismatch": _describe_mismatch, "device": _describe_slow_devices, "together": _describe_entered_by_all,
    "unheard": _describe_missing_reports, "alone": _describe_single_rank, "blocked": _describe_blocked_threads,
    "apart": lambda hang: "No recorded collective shows which rank waits for which.",
    "pause": lambda hang: (
        "No rank waits for another: a checkpoint, an evaluation, a compilation or"
        " a server without requests looks like this."
    ),
}  # fmt: skip


def _additional_sentences(hang: Hang) -> Iterator[str]:
    if hang.asleep:
        yield f"Asleep in the kernel (process state D: storage or a driver): {format_ranks(hang.asleep)}."
    if hang.unheard:
        yield f"No reports from {format_ranks(hang.unheard)}."
    if hang.ended and hang.kind in ("alone", "blocked", "pause", "apart", "together"):
        yield f"{_format_count(len(hang.ended), 'rank has', 'ranks have')} ended."


_SPANS: dict[int, str] = {
    Kind.FORWARD: "the forward pass", Kind.BACKWARD: "the backward pass", Kind.OPTIMIZER: "the optimizer's step",
    Kind.RECOMPUTE: "a recomputation", Kind.CLOSURE: "a closure",
}  # fmt: skip
_NAMED_SPANS: dict[int, str] = {
    Kind.MODULE: "module", Kind.MODULE_BACKWARD: "the backward pass of module", Kind.SECTION: "section",
    Kind.COLLECTIVE: "collective",
}  # fmt: skip
_UNNAMED_SPANS: dict[int, str] = {
    Kind.MODULE: "a module", Kind.MODULE_BACKWARD: "the backward pass of a module", Kind.SECTION: "a section",
    Kind.COLLECTIVE: "a collective",
}  # fmt: skip


def device_place_from_mark(mark: DeviceMark, name: str) -> LastDeviceMark:
    """Return the place that a rank's device has reached, from the newest mark in the ring file.

    name: the name of the span that the mark begins or ends; "" if not known.
    """
    span = _SPANS.get(mark.kind, "")
    if mark.kind in _NAMED_SPANS:
        span = f"{_NAMED_SPANS[mark.kind]} {name}" if name else _UNNAMED_SPANS[mark.kind]
    words = "its beginning" if mark.place == 0 else ""
    if span:
        words = f"the {'end' if mark.is_end else 'beginning'} of {span}"
    stood_s = max(0, mark.looked_ns - mark.since_ns) / 1e9
    return LastDeviceMark(mark.step, mark.place, words, stood_s, mark.kind, mark.is_end)


def _list_places(hang: Hang, user_lines: Mapping[int, str]) -> tuple[str, ...]:
    """Return where the living ranks are: blocking ranks first, then places of few ranks."""
    calls = {rank: name for name, ranks in hang.operations.items() for rank in ranks}
    calls |= {rank: collective_name(where) for rank, where in hang.cycle}
    if hang.collective and not calls:
        calls = dict.fromkeys(hang.waiting, collective_name(hang.collective))

    def describe_place(rank: int, inside: tuple[str, ...]) -> str:
        parts = (
            calls.get(rank),
            open_spans_phrase(inside) if inside else "",
            user_lines.get(rank),
        )
        return ", ".join(filter(None, parts)) or open_spans_phrase(())

    found = group_values(
        (describe_place(rank, inside), rank)
        for inside, ranks in hang.places.items()
        for rank in ranks
    )
    blocking = {each.progress.rank for each in hang.blocking}
    order = sorted(found, key=lambda place: (blocking.isdisjoint(found[place]), len(found[place])))
    texts = [f"{format_ranks(found[place])}: {place}" for place in order[:_MAX_PLACES]]
    rest = len(order) - len(texts)
    return (*texts, *[_format_count(rest, "more place", "more places")] * (rest > 0))


# -- the action


def _next_action(hang: Hang, user_lines: Mapping[int, str]) -> str:
    if hang.blocking:
        main = [each for each in hang.blocking if _has_main_problem(each, hang)] or hang.blocking
        return _action_on_blocking_rank(main[0], user_lines)
    look = (
        f"look at the Python stack of rank {hang.look_at[0]}"
        if hang.look_at
        else "look at the Python stacks"
    )
    return {
        "mismatch": (
            "let all ranks call the same operations in the same order"
            f"{_SAME.get(hang.difference, '')}: look for a call under an `if` whose condition"
            " differs between ranks; TORCH_DISTRIBUTED_DEBUG=DETAIL checks each one."
        ),
        "together": (
            "look at the network and the devices: links, dmesg (Xid, AER), the backend's log and"
            " flight recorder. A GPU that is stuck in an earlier kernel looks the same from the"
            " host."
        ),
        "blocked": (
            "see which kernel runs on each rank's device (cuda-gdb: info cuda kernels): a device"
            ' whose kernel does not belong to a collective is the cause. With nccl="auto", the NCCL'
            " plugin reports ranks whose kernel has not begun."
        ),
        "unheard": "see whether those nodes can be reached, and whether a sidecar runs there.",
        "pause": f"if it takes longer than expected, {look}.",
    }.get(
        hang.kind,
        f"{look} first; the ranks may wait in a point-to-point or an unrecorded operation.",
    )


def _has_main_problem(blocking: BlockingRank, hang: Hang) -> bool:
    return blocking.problem in _GRAVE.get(hang.kind, (hang.kind,))


def _action_on_blocking_rank(blocking: BlockingRank, user_lines: Mapping[int, str]) -> str:
    each = blocking.progress
    who, line = f"rank {each.rank} on {each.host}", user_lines.get(each.rank)
    look = (
        f"{f'find out what {line} waits for on' if line else 'look at the Python stack of'} {who}."
    )
    what_stopped = "find out what stopped it: a debugger, a scheduler that suspends jobs, Ctrl-Z."
    problem, is_stuck = blocking.problem, blocking.problem == "stuck"
    rules = (
        (
            problem in ("busy", "stuck") and each.evaluates and not _is_saving(each),
            f"let all ranks evaluate a part of the data, or let the others wait for {who} in a"
            " barrier of a process group with a longer timeout.",
        ),
        (
            each.state == "uninterruptible" and problem not in ("busy", "device"),
            f"look at dmesg on {each.host}, and at the storage that {who} reads or writes.",
        ),
        (
            is_stuck and each.waits_in,
            f"see which kernel runs on the device of {who} (cuda-gdb: info cuda kernels): a kernel"
            " that does not end, or a collective's kernel that waits for another rank's device.",
        ),
        (
            is_stuck and each.inside[-1:] == (WAIT,),
            f"look at the network and the device of {who}: links, dmesg (Xid, AER), the backend's"
            " log.",
        ),
        (
            is_stuck and _is_saving(each),
            f"look at the storage to which {who} saves, and at its Python stack. If the save only"
            " takes long, let the other ranks wait for it in a barrier, or raise the timeout of the"
            " process group.",
        ),
        (
            is_stuck and each.inside[-1:] == ("data",),
            f"look at the loader of {who}: its workers, its storage, and its Python stack.",
        ),
        (
            problem == "device",
            f"look for the kernel that does not end on {who}: dmesg (Xid), nvidia-smi, cuda-gdb,"
            " and the work that only this rank had in this step.",
        ),
        (problem == "stopped", f"send SIGCONT to {who}, and {what_stopped}"),
        (problem == "traced", f"detach the debugger from {who}, and {what_stopped}"),
        (
            problem == "busy",
            f"if the others need not wait for this work of {who}, move it out of the training loop.",
        ),
        (
            problem == "dead",
            f"read the end of the log of {who}, and dmesg for the out-of-memory killer; then"
            " restart the job.",
        ),
        (
            problem == "silent",
            f"see whether {each.host} can be reached: the machine or its network has failed.",
        ),
        (
            problem == "closed",
            "give all ranks the same number of steps: drop_last=True, a DistributedSampler, or "
            "torch.distributed.algorithms.Join.",
        ),
        (True, look),
    )
    return next(text for applies, text in rules if applies)


# -- names


def _name_ranks_with_hosts(blocking_ranks: Sequence[BlockingRank]) -> str:
    """Return a phrase such as "ranks 2 (node-b) and 3 (node-b)"."""
    names = [f"{each.progress.rank} ({each.progress.host})" for each in blocking_ranks]
    rest = len(names) - _MAX_NAMED
    if rest > 0:
        names[_MAX_NAMED:] = [f"{rest} more"]
    return (
        "rank " + names[0] if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
    )


def format_ranks(ranks: Sequence[int]) -> str:
    found = format_rank_list(ranks)
    return found if found.count(",") < _MAX_RANGES else f"{len(ranks)} ranks"


def _capitalize(words: str) -> str:
    return words[:1].upper() + words[1:]


def _format_count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
