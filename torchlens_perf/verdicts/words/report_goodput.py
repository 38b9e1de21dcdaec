"""Types for goodput in `report --json`. See report.py."""

from __future__ import annotations

from msgspec import Struct


class TimeClass(Struct, frozen=True):
    """Time of a job in one class. All fields are None if the class was not measured."""

    seconds: float | None
    """Mean over the ranks."""
    share: float | None
    """Share of the wall clock."""
    device_hours: float | None
    """Without the time in which no process of the job existed."""
    cost: float | None
    """Device hours times the price; None without a price."""


class JobAttempt(Struct, frozen=True, kw_only=True):
    """One attempt of a job: its processes from the first start to the last end.

    Steps count from 0 in each process. first_step is the number of earlier steps that the model had
    made when its training continued.
    """

    attempt: int
    devices: int
    """Number of ranks."""
    began_unix_s: float
    """For a restart by the same launcher, the end of the previous attempt."""
    ended_unix_s: float
    steps: int
    """Steps that all ranks have made, without skipped updates."""
    first_step: int | None
    """By the optimizer's or framework's own step counter; None if that is not known."""
    saved_step: int | None
    """Steps at the last recorded checkpoint of the attempt; None without a checkpoint."""
    lost_steps: int | None
    """Steps that a later attempt made again; None if not known."""
    seconds: dict[str, float]
    """Time by class before lost work is taken from the classes inside steps. Mean over the
    ranks."""
    not_measured: list[str]
    """Classes whose time is part of `productive`, because it was not measured."""


class Goodput(Struct, frozen=True, kw_only=True):
    """The life of a job in classes of time, which add up to the wall clock."""

    wall_s: float
    """Time from the first process's start to the end of the last attempt."""
    classes: dict[str, TimeClass]
    attempts: list[JobAttempt]
    lost_steps: int | None
    lost_steps_from: str
    """Source of lost_steps: "step counter", "checkpoints" (an estimate), or "" without restarts and
    if not known."""
    energy_j: float | None
    """Energy of all GPUs; None if not measured."""
    energy_j_per_step: float | None
    energy_j_per_token: float | None
    """Per unit of work: `w.step(tokens=)`, else elements of the batches' first tensors."""
    price_per_device_hour: float | None
    """Without devices, the price of an hour of one rank."""
    cost: float | None
    """Cost of the job; None without a price."""
