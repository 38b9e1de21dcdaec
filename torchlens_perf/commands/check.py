"""`torchrun ... -m torchlens_perf check`: measure the ranks, nodes and links of a job before it starts."""

from __future__ import annotations

import argparse

from torchlens_perf.commands.command import Command, argument, one_of


def _run_check(options: argparse.Namespace) -> int:
    from torchlens_perf.check.runner import run_check

    return run_check(options)


COMMAND = Command(
    name="check",
    summary="measure nodes, devices and links before a job",
    description=(
        "Measure every rank, node and link, compare those that should be equal, and compare"
        " with the last check of the same nodes. Start it as the job: with torchrun, srun or"
        " mpirun. The exit code is 0 if nothing is slow, 1 if something is, and 3 if there was"
        " nothing to compare with."
    ),
    arguments=(
        argument(
            "--seconds", type=float, default=30.0, help="duration, at least 2; default: %(default)s"
        ),
        argument(
            "--mesh",
            default="",
            metavar="dp=4,tp=2",
            help="process groups of a device mesh; default: one group of all ranks",
        ),
        one_of(
            argument("--json", default="", metavar="FILE", help="write the result; - for stdout"),
            argument("--data", default="", metavar="PATH", help="measure reads below PATH instead"),
        ),
        argument(
            "--loader",
            default="",
            metavar="MODULE:FUNCTION",
            help="with --data: predict and try num_workers of the DataLoader that FUNCTION() returns",
        ),
        argument("--step-ms", type=float, default=0.0, help="time of a step, for --loader"),
    ),
    run=_run_check,
)
