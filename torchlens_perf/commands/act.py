"""`torchlens-perf act`, `offenders` and `mcp`: what follows from the verdicts of runs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from torchlens_perf.commands.chosen_runs import find_newest_run
from torchlens_perf.commands.command import Command, argument, one_of
from torchlens_perf.store.run_folders import default_folder

ACT = Command(
    name="act",
    summary="report slow nodes to a scheduler or a webhook; sends nothing without --send",
    description=(
        "Report nodes that are named in verdicts on slow ranks to a scheduler or a webhook. Each finding"
        " is sent once to each target, even if the job restarts. RUN/actions.jsonl has what was sent, to whom and why."
    ),
    arguments=(
        argument("run", nargs="?", type=Path, help="default: the newest run here"),
        argument(
            "--to",
            action="append",
            required=True,
            metavar="TARGET",
            help=(
                "slurm (the node's comment), slurm-drain (after the job's end), exclude=FILE (for sbatch"
                " --exclude=./FILE), webhook=URL (as Alertmanager), kubernetes (an event and a"
                " condition of the node), nvsentinel=SOCKET or nvsentinel-drain=SOCKET, nvrx=SOCKET (NVIDIA's"
                " ft_launcher on this node leaves it out of the next rendezvous); may be repeated"
            ),
        ),
        argument("--send", action="store_true", help="send; by default, this is only printed"),
        argument(
            "--allow",
            action="append",
            default=[],
            metavar="NODES",
            help="a pattern of names of nodes that may be reported, such as 'gpu-*'; may be repeated",
        ),
        argument("--follow", action="store_true", help="look every 30 s until the job ends"),
        argument(
            "--min-cost",
            type=float,
            default=0.05,
            metavar="SHARE",
            help="smallest cost as a share of the step; default 0.05",
        ),
        argument(
            "--min-windows",
            type=int,
            default=3,
            metavar="N",
            help="smallest number of windows of steps in which it is slow; default 3",
        ),
        argument(
            "--most-nodes",
            type=int,
            default=1,
            metavar="N",
            help="most nodes that this folder of runs reports in 24 hours; default 1",
        ),
    ),
    run=lambda options: import_module("torchlens_perf.actions.act").follow_run(
        options.run or find_newest_run(), options
    ),
)
OFFENDERS = Command(
    name="offenders",
    summary="nodes that many jobs name, and the hours lost by cause, user, program and framework",
    description=(
        "Read the ended runs of a folder, and list the nodes that verdicts on slow ranks name more often"
        " than luck explains. New runs are added to DIR/fleet.jsonl."
    ),
    arguments=(
        argument("folder", nargs="?", type=Path, metavar="DIR", help="default: the folder of runs"),
        argument(
            "--engine",
            choices=("duckdb", "spark"),
            default="duckdb",
            help="spark: a cluster that is configured, or else this machine; default: duckdb",
        ),
        one_of(
            argument("--json", action="store_true", help="print JSON"),
            argument("--sql", help="print the result of a query on the table fleet instead"),
        ),
    ),
    run=lambda options: import_module("torchlens_perf.actions.offenders").print_offenders(
        options.folder or default_folder(), options
    ),
)
MCP = Command(
    name="mcp",
    summary="answer questions of agents on the runs of a folder, by the Model Context Protocol",
    description=(
        "Serve the Model Context Protocol on stdin and stdout: list runs, verdicts, where the time of a step went,"
        " compare, query. It only reads."
    ),
    arguments=(
        argument("folder", nargs="?", type=Path, metavar="DIR", help="default: the folder of runs"),
    ),
    run=lambda options: import_module("torchlens_perf.actions.start_agents").serve_agents(
        options.folder or default_folder()
    ),
)
