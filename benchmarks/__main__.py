"""Run the named benchmarks, or all of them, and print a Markdown table of each."""

from __future__ import annotations

import os
import platform
import sys

import torch

from benchmarks import (
    capture_cost,
    collective_cost,
    device_marks,
    exchange_scale,
    exit_delay,
    hot_path,
    late_sidecar,
    live_results,
    long_run,
    many_modules,
    merge_scale,
    nccl_plugin,
    operator_counts,
    report_scale,
    serve_reads,
    short_runs,
    sidecar_load,
    telemetry_cost,
    training_step,
    whole_run,
)

BENCHMARKS = {
    "hot_path": hot_path.main,
    "training_step": training_step.main,
    "device_marks": device_marks.main,
    "many_modules": many_modules.main,
    "long_run": long_run.main,
    "exit_delay": exit_delay.main,
    "collective_cost": collective_cost.main,
    "capture_cost": capture_cost.main,
    "operator_counts": operator_counts.main,
    "short_runs": short_runs.main,
    "sidecar_load": sidecar_load.main,
    "exchange_scale": exchange_scale.main,
    "merge_scale": merge_scale.main,
    "report_scale": report_scale.main,
    "whole_run": whole_run.main,
    "telemetry_cost": telemetry_cost.main,
    "nccl_plugin": nccl_plugin.main,
    "live_results": live_results.main,
    "late_sidecar": late_sidecar.main,
    "serve_reads": serve_reads.main,
}


def main() -> int:
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"unknown benchmark {unknown[0]}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    machine = f"{platform.machine()}, {os.cpu_count()} processors, Linux {platform.release()}"
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {machine}, load {os.getloadavg()[0]:.1f}"
    )
    # On users' machines, pip writes bytecode. Without bytecode each process would compile our
    # modules for 0.4 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    missed = 0
    for name in names:
        print(f"\n## {name}\n", flush=True)
        missed += BENCHMARKS[name]()
    return 1 if missed else 0


sys.exit(main())
