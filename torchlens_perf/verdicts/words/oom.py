"""Sentences on an out-of-memory error: rank, step, request, owners of the memory, and action."""

from __future__ import annotations

from collections.abc import Sequence

from torchlens_perf.analysis.statistics.memory import MemoryGrowth
from torchlens_perf.analysis.statistics.quantities import format_bytes, format_percent
from torchlens_perf.run.oom_table import LiveMemoryRow, OutOfMemory
from torchlens_perf.verdicts.verdict import Evidence, Verdict
from torchlens_perf.verdicts.words.report import Rank

# Expandable segments are advised if at least this share of the reserved memory is free but
# fragmented.
_FRAGMENTED_SHARE = 0.1
# The advice is about the failed request if it needs at least this share of the device.
_ONE_REQUEST_SHARE = 0.25
# The advice is about one place in the code if it has allocated at least this share of the memory.
_ONE_PLACE_SHARE = 0.3
# The advice is about other users of the device if they use at least this share of it.
_OTHERS_SHARE = 0.2
_MANY_BLOCKS = 2
# The driver may report the size of a device with and without memory that it reserves for itself.
_ALL_SHARE = 0.98


class OutOfMemoryEvidence(Evidence, frozen=True, tag="out_of_memory"):
    """Evidence on the first rank that ran out of its device's memory, and on all that did."""

    oom: OutOfMemory

    @property
    def failed_at(self) -> tuple[int, int]:
        return self.oom["step"], self.oom["time_unix_ns"]

    def describe(self, verdict: Verdict) -> list[str]:
        oom, table = self.oom, self.oom["table"]
        inside = f", in {' > '.join(oom['inside'])}" if oom["inside"] else ""
        also = len(self.ranks) - 1
        others = f"So did {also} other rank{'s' if also > 1 else ''}." if also else ""
        if table is None:
            held = (
                "No table was written, because memory had run out shortly before: see"
                f" {oom['earlier']}."
            )
        else:
            held = (
                f"{format_bytes(table['allocated_bytes'], 'B')} were allocated, and"
                f" {format_bytes(table['inactive_bytes'], 'B')} more were reserved but"
                f" free.{_describe_largest_owner(table['rows'])}"
            )
        return [
            f"Rank {verdict.rank} ({oom['host']}) ran out of device memory in step"
            f" {oom['step']}{inside}: {_describe_request(oom)}.",
            held,
            others,
        ]


def build_out_of_memory_verdicts(ranks: Sequence[Rank]) -> list[Verdict]:
    """Return a verdict on the first rank that ran out of device memory and did not recover."""
    ended = [(rank["out_of_memory"], rank) for rank in ranks if was_ended_by_oom(rank)]
    found = [(oom, rank) for oom, rank in ended if oom is not None]
    if not found:
        return []
    oom, first = min(found, key=lambda each: each[0]["time_unix_ns"])
    also = (rank["rank"] for _, rank in found if rank is not first)
    return [
        Verdict(
            kind="out_of_memory",
            rank=first["rank"],
            since_step=oom["step"],
            confidence=1.0,
            action=build_next_action(oom, first["memory"]["growth"]),
            evidence=OutOfMemoryEvidence(oom, ranks=(first["rank"], *also)),
        )
    ]


def was_ended_by_oom(rank: Rank) -> bool:
    """Return True if a rank ran out of memory and did not recover.

    A rank has recovered if it finished a later step, or if the script caught the error and closed
    watch().
    """
    oom = rank["out_of_memory"]
    if oom is None or (oom.get("caught") and rank["state"] == "closed"):
        return False
    return bool(rank["last_step"] is None or rank["last_step"] < oom["step"])


def out_of_memory_note(rank: Rank) -> str | None:
    """Return a note on a rank that ran out of memory and recovered; else None."""
    oom = rank["out_of_memory"]
    if oom is None or was_ended_by_oom(rank):
        return None
    went_on = (
        "went on"
        if rank["last_step"] is not None and rank["last_step"] >= oom["step"]
        else "ended without an error"
    )
    return (
        f"rank {rank['rank']} ran out of device memory in step {oom['step']} ({_describe_request(oom)}),"
        f" and {went_on}: see {oom['file']}"
    )


def _describe_request(oom: OutOfMemory) -> str:
    asked, free, limit = (
        format_bytes(each, "B")
        for each in (oom["asked_bytes"], oom["free_bytes"], oom["limit_bytes"])
    )
    if not _has_memory_fraction(oom):
        return f"it requested {asked}, but only {free} of the device's {limit} were free"
    reserved = (
        f", of which it had reserved {format_bytes(oom['table']['reserved_bytes'], 'B')}"
        if oom["table"] is not None
        else ""
    )
    whole = format_bytes(oom["device_bytes"], "B")
    return (
        f"it requested {asked}, but may only use {limit} of the device's {whole}{reserved}; {free} of"
        " the device were free"
    )


def _has_memory_fraction(oom: OutOfMemory) -> bool:
    """Return True if torch.cuda.set_per_process_memory_fraction() limits the process to a share of
    the device."""
    return oom["limit_bytes"] < _ALL_SHARE * _device_bytes(oom)


def _device_bytes(oom: OutOfMemory) -> int:
    return oom.get("device_bytes") or oom["limit_bytes"]


def _describe_largest_owner(rows: list[LiveMemoryRow]) -> str:
    if not rows:
        return ""
    blocks = f"{rows[0]['blocks']} allocation{'s' if rows[0]['blocks'] > 1 else ''}"
    return f" The largest part: {format_bytes(rows[0]['bytes'], 'B')} in {blocks}, {allocation_place(rows[0])}."


def allocation_place(row: LiveMemoryRow) -> str:
    """Return a phrase for the place in the code that allocated a row's blocks."""
    if not row["stack"]:
        return f"of {format_bytes(row['largest_bytes'], 'B')} each, without a Python stack"
    return f"{row['module']}, {row['stack'][0]}" if row["module"] else row["stack"][0]


def build_next_action(oom: OutOfMemory, growth: MemoryGrowth | None) -> str:
    """Return the action that is likely to help, considering what uses the memory."""
    table, limit, asked = oom["table"], oom["limit_bytes"], oom["asked_bytes"]
    if table is None:
        return (
            _describe_growth(growth)
            or f"see {oom['earlier']}; use a smaller batch, checkpointing, or sharding (FSDP)."
        )
    rows, device_bytes = table["rows"], _device_bytes(oom)
    others = device_bytes - oom["free_bytes"] - table["reserved_bytes"]
    free = max(0, min(oom["free_bytes"], limit - table["reserved_bytes"]))
    fragmented = table["inactive_bytes"] >= _FRAGMENTED_SHARE * table["reserved_bytes"]
    if oom["free_bytes"] < asked and others >= _OTHERS_SHARE * device_bytes:
        return (
            f"{format_bytes(others, 'B')} of the device were not allocated by torch: look for other"
            " processes on it (nvidia-smi), and for libraries that allocate memory themselves."
        )
    if fragmented and not table["expandable"] and free + table["inactive_bytes"] >= asked:
        return (
            f"{format_percent(table['inactive_bytes'] / table['reserved_bytes'])} of the reserved memory"
            " is free, but in pieces: set PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    if growth is not None:
        return _describe_growth(growth)
    if _has_memory_fraction(oom) and oom["free_bytes"] >= asked:
        return (
            "the device has free memory, but the process's share of it is full:"
            f" {format_percent(limit / device_bytes)} (torch.cuda.set_per_process_memory_fraction); raise"
            " the share, or use a smaller batch."
        )
    if asked >= _ONE_REQUEST_SHARE * limit:
        where = f" at {oom['stack'][0]}" if oom["stack"] else ""
        whole = "the process's share" if _has_memory_fraction(oom) else "the device"
        return f"one request{where} needs {format_percent(asked / limit)} of {whole}: compute it in parts."
    if not any(row["stack"] for row in rows):
        return (
            "a smaller batch, activation checkpointing, or sharding (FSDP); "
            "TORCHLENS_PERF_MEMORY=history shows which modules and lines hold the memory."
        )
    top = max(rows, key=lambda row: (bool(row["module"]), row["bytes"]))
    if (
        top["module"]
        and top["blocks"] >= _MANY_BLOCKS
        and top["bytes"] >= _ONE_PLACE_SHARE * table["allocated_bytes"]
    ):
        return (
            f"checkpoint the activations of {top['module'].rpartition(' > ')[2]}"
            " (torch.utils.checkpoint), which hold"
            f" {format_percent(top['bytes'] / table['allocated_bytes'])}, or take a smaller batch."
        )
    return (
        "a smaller batch, activation checkpointing, or sharding (FSDP); the table shows what holds"
        " the memory."
    )


def _describe_growth(growth: MemoryGrowth | None) -> str:
    if growth is None:
        return ""
    return (
        f"allocated memory has grown by {format_bytes(growth['bytes_per_step'], 'B')} a step over steps"
        f" {growth['since_step']} to {growth['until_step']}: something keeps tensors from step to"
        " step, such as a list of losses without .item() or .detach()."
    )


def format_oom_table(oom: OutOfMemory) -> str:
    """Return the table of memory owners as plain text, to be read without a report."""
    table = oom["table"]
    lines = [
        (
            f"rank {oom['rank']} ({oom['host']}), step {oom['step']}, device {oom['device']}: out"
            " of memory"
        ),
        _describe_request(oom),
        *([f"errors without a table: {oom['untold']}"] if oom["untold"] else []),
    ]
    if table is None:
        return (
            "\n".join(
                [*lines, f"no table: memory had run out shortly before, see {oom['earlier']}"]
            )
            + "\n"
        )
    lines += [
        (
            f"allocated {format_bytes(table['allocated_bytes'], 'B')}, reserved"
            f" {format_bytes(table['reserved_bytes'], 'B')}, of which"
            f" {format_bytes(table['inactive_bytes'], 'B')} are free (largest free block"
            f" {format_bytes(table['largest_inactive_bytes'], 'B')})"
        ),
        *(f"  requested at {frame}" for frame in oom["stack"]),
        "",
        "live blocks, by the code that requested them:",
    ]
    for row in table["rows"]:
        new = "" if row["new_blocks"] is None else f", {row['new_blocks']} of them new"
        lines.append(
            f"{format_bytes(row['bytes'], 'B'):>10}  {row['blocks']} blocks{new}  {row['module']}".rstrip()
        )
        lines += [f"{'':12}{frame}" for frame in row["stack"] or (allocation_place(row),)]
    if table["other_blocks"]:
        lines.append(
            f"{format_bytes(table['other_bytes'], 'B'):>10}  {table['other_blocks']} blocks in other"
            " places"
        )
    if table["history_events"]:
        lines.append(
            f"new: allocated during the last {table['history_events']} allocations and frees"
            f" ({table['history_s']:.1f} s)"
        )
    return "\n".join(lines) + "\n"
