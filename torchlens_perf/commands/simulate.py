"""`torchlens-perf simulate`: simulate a run of many ranks with planted faults, and report on it.

For up to 1024 ranks, ring files are written and read by the ordinary sidecar. The run directory,
the report and the OTLP export (if an endpoint is configured) are as in a real run, so alert rules
can be tried. With --rows, any number of ranks is passed directly to the straggler detector. Each
planted fault is compared with the report's verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torchlens_perf.commands.command import Command, argument
from torchlens_perf.commands.progress import Advanced, Progress, ignore_progress
from torchlens_perf.errors import RunStoreError, require
from torchlens_perf.run import ownership
from torchlens_perf.run.open_files import raise_open_file_limit

if TYPE_CHECKING:
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.simulate.planted import ReportedVerdicts
    from torchlens_perf.simulate.rings import SimulatedDevice
    from torchlens_perf.simulate.simulation import Simulation, Topology
    from torchlens_perf.verdicts.stragglers.findings import Findings

_MAX_LINES = 16
_OTHER_FILES = 128  # Number of open files that do not belong to a rank.
_FLUSH_TIMEOUT_S = 10.0
_LOCK = "simulation.lock"
_MAX_UNKEPT_RECORDS = 1 << 18
_EXAMPLES = """faults, each as KIND:NAME=VALUE,...; shares are of a rank's usual work in a step:
  constant:rank=3,share=0.25[,phase=forward][,since=40][,until=90]
  drifting:rank=3,share=0.1[,over=200]       intermittent:rank=3,share=0.2[,slow=1][,of=4]
  moving:ranks=3+5,share=0.1[,every=100]     node:node=1,share=0.05
  stalls:rank=3,share=2[,every=50]           link:rank=3,share=0.1[,dimension=tp]
and what is no fault of any rank:
  pauses:share=0.3[,every=100][,together=yes]   variable_length:spread=0.2[,reported=yes]"""


def _run_simulate(options: argparse.Namespace) -> int:
    simulation = _build_simulation(options)
    simulate = _simulate_without_files if options.rows else _simulate_with_files
    _print_planted_faults(simulation, options, simulate(simulation, options))
    return 0


def _build_simulation(options: argparse.Namespace) -> Simulation:
    """Return the simulation that the options describe. Raise ConfigError for invalid options."""
    from torchlens_perf.simulate.faults import parse_fault
    from torchlens_perf.simulate.launch_bound import check_topology
    from torchlens_perf.simulate.rings import MAX_RANKS
    from torchlens_perf.simulate.simulation import Simulation

    require(options.steps >= 1, f"--steps must be 1 or more, got {options.steps}")
    simulation = Simulation(
        _parse_topology(options),
        faults=[parse_fault(text) for text in options.fault],
        seed=options.seed,
        noise=options.noise,
        spread=options.spread,
        work_ns=options.step_ms * 1e6,
    )
    require(
        options.late_steps >= 0 and 0 <= options.missing < 1,
        "--late-steps must be 0 or more, and --missing must be at least 0 and below 1",
    )
    require(
        not options.rows or not (options.device or options.launch_bound),
        "--rows simulates no devices: remove --rows, or --device and --launch-bound",
    )
    if options.launch_bound:
        check_topology(simulation.topology)
    if options.rows:
        require(options.out is None, "--rows writes no files: remove --rows or --out")
        return simulation
    ranks = simulation.topology.rank_count
    require(
        ranks <= MAX_RANKS, f"--out supports at most {MAX_RANKS} ranks, got {ranks}: use --rows"
    )
    require(options.out is not None, "--out DIR is missing: name the run directory to create")
    return simulation


def _parse_topology(options: argparse.Namespace) -> Topology:
    from torchlens_perf.simulate.simulation import Topology

    for option, value in (("--ranks", options.ranks), ("--node-size", options.node_size)):
        require(value is None or value >= 1, f"{option} must be 1 or more, got {value}")
    sizes = {"dp": 8 if options.ranks is None else options.ranks, "tp": 1, "pp": 1}
    if options.topology:
        sizes = {"dp": 1, "tp": 1, "pp": 1}
        for pair in options.topology.split(","):
            name, _, size = pair.partition("=")
            require(
                name in sizes and size.isdigit(),
                f"--topology {options.topology}: expected sizes such as dp=4,tp=2,pp=1",
            )
            sizes[name] = int(size)
    topology = Topology(**sizes, node_size=options.node_size)
    require(
        options.ranks in (None, topology.rank_count),
        f"--ranks {options.ranks} and --topology {options.topology} do not agree:"
        f" {topology.rank_count}",
    )
    return topology


def _simulate_with_files(simulation: Simulation, options: argparse.Namespace) -> ReportedVerdicts:
    """Record the simulation into a run directory, print its report, and return its verdicts."""
    from torchlens_perf.report.report_json import to_json_types
    from torchlens_perf.report.run_report import load_report_and_states
    from torchlens_perf.run.directory import RunDirectory
    from torchlens_perf.simulate.planted import ReportedVerdicts
    from torchlens_perf.simulate.rings import OPEN_FILES, SimulatedDevice
    from torchlens_perf.view.terminal import print_report

    run = RunDirectory(options.out.absolute())
    if run.nodes.exists():
        raise RunStoreError(f"{run.path} already is a run directory: choose another --out")
    needed = OPEN_FILES * simulation.topology.rank_count + _OTHER_FILES
    limit = raise_open_file_limit()
    require(
        not 0 <= limit < needed,
        f"{needed} files must be open at the same time, but the limit is {limit}: raise the"
        " limit, or use --rows",
    )
    run.create()
    note = (
        f"simulated with {' '.join(f'--fault {each}' for each in options.fault) or 'no fault'}"
        f"{' (share: how much more work)' * bool(options.fault)};"
        f" noise of {options.noise * 20:g}% of a step, seed {options.seed}"
    )
    device = None
    if options.device or options.launch_bound:
        device = SimulatedDevice(options.late_steps, options.missing, options.launch_bound)
    with (
        Progress("simulating", quiet=options.quiet) as progress,
        ownership.restrict_new_files_like(run.nodes),
    ):
        record_simulation(simulation, options.steps, run, note, device, progress)
    report, states = load_report_and_states(run)
    if not options.json:
        print_report(report, sys.stdout, str(run.path))
    findings = max((state.findings for state in states), key=lambda each: each.compared)
    return ReportedVerdicts(
        to_json_types(report["verdicts"]),
        _detectable_s(findings) if findings.compared else None,
        report["slow_links"].undecided,
    )


def _detectable_s(findings: Findings) -> float | None:
    return None if findings.detectable_ns is None else findings.detectable_ns / 1e9


def record_simulation(
    simulation: Simulation,
    steps: int,
    run: RunDirectory,
    note: str,
    device: SimulatedDevice | None = None,
    advanced: Advanced = ignore_progress,
) -> None:
    """Write the run's ring files block by block, and let the ordinary sidecar read each block.

    One sidecar reads the ranks of all hosts, as if they were on one host. note: the run's origin,
    for the report. The sidecar runs on the calling thread, and exports over OTLP if the environment
    configures an endpoint.
    """
    from torchlens_perf.exporters.otlp_environment import create_exporter_from_environment
    from torchlens_perf.page.run_results import write_report
    from torchlens_perf.run.clock import Anchor
    from torchlens_perf.run.sidecar_lock import SidecarLock
    from torchlens_perf.sidecar.loop import run_sidecar
    from torchlens_perf.sidecar.node import Sidecar
    from torchlens_perf.simulate.launch_bound import LaunchBoundJob
    from torchlens_perf.simulate.rings import SimulatedRank, Timeline

    topology = simulation.topology
    hosts = LaunchBoundJob(topology) if device is not None and device.launch_bound else None
    host = topology.host_name(0)
    with contextlib.ExitStack() as cleanup:
        # The id of a simulated run is the name of its folder, which other runs of the node may have.
        lock = SidecarLock(run.path / _LOCK)
        require(lock.acquire(), f"another process simulates {run.path}")
        # No file may stay in shared memory, even after Ctrl-C.
        cleanup.callback(lock.remove)
        exporter = create_exporter_from_environment(run, host)
        # The run begins in the past, so that none of its timestamps is in the future.
        begin_unix_ns = time.time_ns() - math.ceil(1.5 * steps * simulation.work_ns)
        # All ranks of a sidecar share a monotonic clock, by which collectives are matched.
        begin = Anchor(10**12, begin_unix_ns, 0)
        ranks = [
            SimulatedRank(run, host, topology, rank, begin, note, device)
            for rank in range(topology.rank_count)
        ]
        sidecar = Sidecar(run, host, exporter, write_report)
        for part in simulation.steps(steps):
            timeline = Timeline.from_steps(part) if hosts is None else hosts.run_steps(part)
            for rank in ranks:
                rank.write_steps(timeline)
            sidecar.read_rings()
            sidecar.count_records()
            sidecar.judge_ranks(time.monotonic())
            sidecar.export_results()
            if exporter is not None:
                # The simulation makes steps faster than a real run.
                exporter.wait_for_room(_FLUSH_TIMEOUT_S)
            if sidecar.records.unsaved_records >= _MAX_UNKEPT_RECORDS:
                sidecar.save_records()
            advanced(part.first_step + len(part), steps)
        for rank in ranks:
            rank.close()
        run_sidecar(sidecar, lock)


def _simulate_without_files(
    simulation: Simulation, options: argparse.Namespace
) -> ReportedVerdicts:
    """Judge the simulated steps, print the verdicts as text, and return them."""
    from torchlens_perf.analysis.statistics.quantities import format_duration
    from torchlens_perf.report.report_json import to_json_types
    from torchlens_perf.simulate.planted import ReportedVerdicts
    from torchlens_perf.verdicts.words.stragglers import SlowRankContext, build_straggler_verdicts

    topology, steps = simulation.topology, options.steps
    with Progress("simulating", quiet=options.quiet) as progress:
        findings, judged_s = _judge_steps(simulation, steps, progress)
    now, before = build_straggler_verdicts(SlowRankContext(), findings)
    rows = to_json_types([*now, *before])
    detectable_s = _detectable_s(findings)
    lines = [each.sentence for each in (*now, *before)[:_MAX_LINES]]
    if len(rows) > _MAX_LINES:
        lines.append(f"and {len(rows) - _MAX_LINES} more verdicts")
    if detectable_s is None:
        are_alone = topology.dp * topology.tp < 2
        why = "no two ranks do the same work" if are_alone else f"{steps} steps are too few"
        lines.append(f"Nothing could be compared: {why}.")
    elif not rows:
        smallest = format_duration(detectable_s)
        lines.append(f"No rank is slow. Smallest detectable slowdown: {smallest} a step.")
    lasting = f" of {findings.step_ns / 1e6:.1f} ms" if findings.step_ns else ""
    lines.append(
        f"{topology.rank_count} ranks, {steps} steps{lasting}; judged in"
        f" {1e3 * judged_s / steps:.1f} ms a step"
    )
    if not options.json:
        sys.stdout.writelines(f"{line}\n" for line in lines)
    return ReportedVerdicts(rows, detectable_s, None)


def _judge_steps(simulation: Simulation, steps: int, advanced: Advanced) -> tuple[Findings, float]:
    """Pass all steps to the detector. Return its findings, and the time that it took in seconds."""
    from torchlens_perf.analysis.statistics.step_bins import choose_row_width
    from torchlens_perf.verdicts.causes.straggler_groups import add_straggler_groups
    from torchlens_perf.verdicts.stragglers.detector import StragglerDetector

    topology, judge, judged_s = simulation.topology, StragglerDetector(), 0.0
    places = {rank: topology.placement(rank) for rank in range(topology.rank_count)}
    for rank, place in places.items():
        judge.set_placement(rank, place)
    width = min(choose_row_width(simulation.work_ns), 32)
    for part in simulation.steps(steps):
        blocks = list(part.detector_rows(width))
        begun_s = time.perf_counter()
        for population, block in blocks:
            judge.add_bin_batch(population, block)
        judge.judge()
        judged_s += time.perf_counter() - begun_s
        advanced(part.first_step + len(part), steps)
    begun_s = time.perf_counter()
    findings = add_straggler_groups(judge.judge(final=True), places)
    return findings, judged_s + time.perf_counter() - begun_s


def _print_planted_faults(
    simulation: Simulation, options: argparse.Namespace, compared: ReportedVerdicts
) -> None:
    from torchlens_perf.report.report_json import write_json
    from torchlens_perf.simulate.planted import compare_faults

    found = compare_faults(options.fault, simulation, options.steps, compared)
    if not options.json:
        sys.stdout.writelines(f"{line}\n" for line in found.format_lines())
        return
    write_json(
        {
            "run": None if options.rows else str(options.out),
            "ranks": simulation.topology.rank_count,
            "steps": options.steps,
            "smallest_detectable_s": compared.detectable_s,
            "planted": found.planted,
            "not_planted": found.unmatched,
            "verdicts": compared.rows,
        },
        sys.stdout,
    )


COMMAND = Command(
    name="simulate",
    summary="simulate a run with planted faults, and report on it",
    description=(
        "Simulate training with planted faults, and report on it. Step times vary as in recorded"
        " runs."
    ),
    epilog=_EXAMPLES,
    arguments=(
        argument(
            "--ranks", type=int, help="number of ranks; default: 8, or the ranks of --topology"
        ),
        argument(
            "--topology",
            help="sizes of the device mesh, for example dp=4,tp=2,pp=1; default: data parallel only",
        ),
        argument("--node-size", type=int, default=8, help="ranks on one host; default 8"),
        argument(
            "--fault",
            action="append",
            default=[],
            metavar="FAULT",
            help="a planted fault, see below; may be repeated",
        ),
        argument("--steps", type=int, default=200, help="default 200"),
        argument(
            "--step-ms",
            type=float,
            default=200.0,
            help="typical work of a rank per step in ms; default 200",
        ),
        argument(
            "--noise",
            type=float,
            default=0.1,
            help="factor for the recorded noise; default 0.1, which is 2 %% of a step",
        ),
        argument(
            "--spread",
            type=float,
            default=0.003,
            help="relative size of lasting differences between ranks; default 0.003",
        ),
        argument("--seed", type=int, default=0, help="seed of the random numbers; default 0"),
        argument(
            "--device",
            action="store_true",
            help="simulate work on devices, which are judged by device time",
        ),
        argument(
            "--launch-bound",
            action="store_true",
            help="simulate devices that wait for kernel launches; only for data parallel ranks",
        ),
        argument(
            "--late-steps",
            type=int,
            default=1,
            help="number of steps by which device times are late; default 1",
        ),
        argument(
            "--missing",
            type=float,
            default=0.0,
            help="share of steps without device times; default 0",
        ),
        argument(
            "--out",
            type=Path,
            metavar="DIR",
            help="the run directory to create, for at most 1024 ranks; not allowed with --rows",
        ),
        argument(
            "--rows",
            action="store_true",
            help="simulate any number of ranks without files; slow links cannot be found",
        ),
        argument(
            "--json",
            action="store_true",
            help="print the planted faults and the verdicts on them as JSON",
        ),
    ),
    run=_run_simulate,
)
