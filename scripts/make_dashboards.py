"""Write the Grafana dashboards of torchlens_perf/deploy and the Prometheus Operator's form of the
alert rules.

Needs grafana-foundation-sdk (the extra `dashboards`). Panels about ranks show a maximum, a minimum,
a quantile over ranks, or how often each rank arrived last. A mean over ranks would hide the slow
one.

    python scripts/make_dashboards.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import (
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from torchlens_perf.view import theme

DEPLOY = Path(__file__).parents[1] / "torchlens_perf" / "deploy"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
RANK, PHASE = "torch_distributed_rank", "torch_train_phase"
# Size of a panel. Grafana's grid has 24 columns.
WIDTH, HEIGHT = 12, 8
OWN, STEP, PHASES = (
    f"torch_train_{name}_seconds" for name in ("step_own_time", "step_duration", "phase_duration")
)  # fmt: skip


def of_run(expression: str) -> str:
    """Limit the expression to the nodes of the selected run, while the run was active."""
    return f'({expression} and on (job, instance) target_info{{job=~"$job",torch_run_id=~"$run"}})'


def rate(counter: str, labels: str = "") -> str:
    return f"rate({counter}{labels}[$__rate_interval])"


def mean_s(histogram: str, labels: str = "") -> str:
    """Return the mean seconds per step of each rank, or of each node in jobs of more
    than 64 ranks.
    """
    return f"({rate(f'{histogram}_sum', labels)} / {rate(f'{histogram}_count', labels)})"


CHOSEN = f'{{{RANK}=~"$rank"}}'
DIED = 'torch_train_processes_ended_total{torch_train_process_end="died"}'
# Divided by all steps of the run, not only by steps that had the phase.
PHASE_S = (
    f"({rate(f'{PHASES}_sum')} / on (job, instance, {RANK}) group_left () {rate(f'{STEP}_count')})"
)
STEP_BUCKETS, LOST = rate(f"{STEP}_bucket"), rate("torchlens_perf_records_lost_total")


def share(phase: str) -> str:
    """Return the phase's share of the step time of each rank."""
    labels = f'{{{PHASE}="{phase}"}}'
    return (
        f"({rate(f'{PHASES}_sum', labels)} / on (job, instance, {RANK}) group_left ()"
        f" {rate(f'{STEP}_sum')})"
    )


class Query(NamedTuple):
    expression: str
    legend: str = ""


class Panel(NamedTuple):
    title: str
    unit: str
    queries: Sequence[Query]
    what: str
    """Description that explains how to read the panel."""
    kind: str = "lines"
    """One of lines, stack, number, states, heat or table."""
    nothing: str = "no data"
    """Text that the panel shows if there is no value."""
    width: int = WIDTH


def extremes(of: str, expression: str) -> list[Query]:
    """Return queries for the maximum and the median over ranks."""
    return [
        Query(f"max({of_run(expression)})", f"{of}, largest of all ranks"),
        Query(f"quantile(0.5, {of_run(expression)})", f"{of}, median"),
    ]


JOB = [
    Panel(
        "Verdicts", "none",
        [Query(of_run("torch_train_alert"), f"{{{{torch_train_alert_kind}}}} rank {{{{{RANK}}}}} {{{{{PHASE}}}}}")],
        "Open alerts, by kind, rank and phase. At most 32 series, whatever the job's size.",
        "states", "no open alert", 24,
    ),
    Panel("Slow ranks", "none", [Query(f"sum({of_run('torch_train_stragglers')})")],
          "Compared by compute time, without waits for other ranks.", "number", "not compared", 4),
    Panel("Cost of the slow ranks", "s", [Query(f"max({of_run('torch_train_straggler_cost_seconds')})")],
          "How much shorter each step would be without them.", "number", "none", 4),
    Panel("Hang", "s", [Query(f"max({of_run('torch_train_hang_duration_seconds')})")],
          "Time since a rank last finished a step, if far above the usual step time.", "number", "no hang", 4),
    Panel("Step", "none", [Query(f"min({of_run('torch_train_step_last')})")],
          "The last step that all running ranks have finished.", "number", width=4),
    Panel("Ranks running", "none", [Query(f"sum({of_run('torch_train_ranks')})")], "On all nodes.", "number", width=4),
    Panel("Crashed processes", "none",
          [Query(f"sum({of_run(DIED)})")],
          "Processes that were killed or crashed.", "number", width=4),
    Panel("Step without comm wait: slowest and fastest rank", "s",
          [Query(f"max({of_run('torch_train_step_own_time_slowest_seconds')})", "slowest rank"),
           Query(f"min({of_run('torch_train_step_own_time_fastest_seconds')})", "fastest rank")],
          "Newest steps, without waits for other ranks. Step times are equal on all ranks; this time is not."),
    Panel("Step time", "s",
          [Query(f"histogram_quantile(0.5, sum by (le) ({of_run(STEP_BUCKETS)}))", "median"),
           Query(f"histogram_quantile(0.99, sum by (le) ({of_run(STEP_BUCKETS)}))", "99th percentile")],
          "Steps of all ranks. Points are exemplars: steps that were exported as traces."),
    Panel("Step time histogram", "s", [Query(f"sum by (le) ({of_run(STEP_BUCKETS)})", "{{le}}")],
          "Outlier steps appear as a separate row.", "heat"),
    Panel("Cost of each slow rank", "s",
          [Query(of_run("torch_train_straggler_cost_seconds"), f"rank {{{{{RANK}}}}} {{{{{PHASE}}}}}")],
          "Ranks that are slow together share one cost.", nothing="no slow rank"),
    Panel("Phases: slowest rank of each", "s",
          [Query(f"max by ({PHASE}) ({of_run(PHASE_S)})", f"{{{{{PHASE}}}}}")],
          "Seconds per step. Each phase may be of another rank, so the phases do not add up to a step."),
    Panel("Communication wait", "percentunit",
          [Query(f"max({of_run(share('communication'))})", "rank that waits most"),
           Query(f"min({of_run(share('communication'))})", "rank that waits least")],
          "Share of the step. Other ranks wait for the rank that waits least."),
    Panel("Data loading", "percentunit", extremes("data", share("data")), "Share of the step. The ideal is 0."),
    Panel("Throughput", "none",
          [Query(f"max(sum by (job, instance) ({of_run(rate('torch_train_steps_total'))}) "
                 "/ on (job, instance) torch_train_ranks)", "steps per second")],
          "Steps per second of one rank of the fastest node."),
    Panel("Overhead of torchlens_perf", "percentunit",
          [Query(f"max({of_run(rate('process_cpu_seconds_total'))})", "CPU of the busiest sidecar"),
           Query(f"max({of_run(share('tool'))})", "hooks, share of the step, highest rank")],
          "CPU time of the sidecar, and time of the hooks in the training thread."),
    Panel("Records lost", "none", [Query(f"sum({of_run(LOST)})", "records per second")],
          "Lost records are missing in all figures. The ideal is 0."),
]  # fmt: skip

RANKS = [
    Panel("Step without comm wait: slowest ranks", "s",
          [Query(f"topk(8, {of_run(mean_s(OWN))})", f"rank {{{{{RANK}}}}} {{{{instance}}}}"),
           Query(f"quantile(0.5, {of_run(mean_s(OWN))})", "median of all ranks")],
          "Above 64 ranks, a line is a node, or a slow rank.", width=24),
    Panel("Excess over the median rank", "s",
          [Query(f"topk(16, ({of_run(mean_s(OWN))}) - scalar(quantile(0.5, {of_run(mean_s(OWN))})))",
                 f"rank {{{{{RANK}}}}} {{{{instance}}}}")],
          "Step time without comm wait above the median, of the 16 slowest ranks.", "states", width=24),
    Panel("Phases of the chosen ranks", "s",
          [Query(of_run(PHASE_S.replace(f"{PHASES}_sum", f"{PHASES}_sum{CHOSEN}")),
                 f"rank {{{{{RANK}}}}} {{{{{PHASE}}}}}")],
          "Seconds per step, stacked: phases add up to the step.", "stack"),
    Panel("Step time of the chosen ranks, 99th percentile", "s",
          [Query(f"histogram_quantile(0.99, sum by (le, {RANK}) ({of_run(rate(f'{STEP}_bucket', CHOSEN))}))",
                 f"rank {{{{{RANK}}}}}")],
          "Points are exemplars: steps that were exported as traces."),
    Panel("Communication wait of the chosen ranks", "percentunit",
          [Query(of_run(rate("torch_collective_wait_seconds_total", CHOSEN)), f"rank {{{{{RANK}}}}}")],
          "Share of the time. Other ranks wait for a rank that waits little."),
    Panel("Device time of the chosen ranks", "s",
          [Query(of_run(mean_s("torch_train_device_duration_seconds", CHOSEN)),
                 f"rank {{{{{RANK}}}}} {{{{{PHASE}}}}}")],
          "Mean duration of each phase by the device's clock."),
]  # fmt: skip

_LAST_SHARE = (
    f"{rate('torch_collective_arrived_last_total')} / {rate('torch_collective_compared_total')}"
)
COLLECTIVES = [
    Panel("Last to arrive", "percentunit",
          [Query(f"topk(8, {of_run(_LAST_SHARE)})", f"rank {{{{{RANK}}}}}")],
          "Share of collectives, of groups on one node. Equal ranks arrive last equally often.", width=24),
    Panel("Last to arrive: counts", "none",
          [Query(f"topk(16, {of_run('torch_collective_arrived_last_total')})")],
          "Since the start of the sidecar.", "table"),
    Panel("Lag behind the previous rank", "percentunit",
          [Query(f"topk(8, {of_run(rate('torch_collective_lag_seconds_total'))})", f"rank {{{{{RANK}}}}}")],
          "Time per second by which a rank arrives later than the rank before it."),
    Panel("Wait for the last rank", "percentunit",
          [Query(f"max({of_run(rate('torch_collective_wait_seconds_total'))})", "rank that waits most"),
           Query(f"min({of_run(rate('torch_collective_wait_seconds_total'))})", "rank that waits least")],
          "Share of the time in which a rank waits in collectives for the last rank."),
    Panel("Collectives per second", "none",
          [Query(f"sum by (torch_collective_operation) ({of_run(rate('torch_collective_operations_total'))})",
                 "{{torch_collective_operation}}")], "Sum over all ranks."),
    Panel("Bytes per second", "Bps",
          [Query(f"sum by (torch_collective_operation) ({of_run(rate('torch_collective_io_bytes_total'))})",
                 "{{torch_collective_operation}}")], "Tensor sizes, summed over all ranks."),
]  # fmt: skip

_STATE = "torch_train_memory_state"
_DEVICE = "torch_train_memory_device_bytes"
_ROOM = f'({_DEVICE}{{{_STATE}="limit"}} - ignoring ({_STATE}) {_DEVICE}{{{_STATE}="peak"}})'
MEMORY = [
    Panel("Memory at the end of the last step", "bytes",
          [Query(f"max({of_run('torch_train_memory_usage_bytes')})", "highest rank"),
           Query(f"min({of_run('torch_train_memory_usage_bytes')})", "lowest rank")],
          "Device memory. On a CPU, resident memory of the process.", width=24),
    Panel("Processes out of device memory", "none",
          [Query(f"sum({of_run('torch_train_processes_out_of_memory_total')})")],
          "RUN_DIR/oom lists what the memory held.", "number"),
    Panel("Device memory: highest rank", "bytes",
          [Query(f"max by ({_STATE}) ({of_run(_DEVICE)})", f"{{{{{_STATE}}}}}")], "By torch's caching allocator."),
    Panel("Free device memory: lowest rank", "bytes",
          [Query(f"min({of_run(_ROOM)})", "limit minus peak")], "At a few gigabytes a larger batch may not fit."),
    Panel("cudaMalloc retries", "none",
          [Query(f"max({of_run(rate('torch_train_memory_alloc_retries_total'))})", "per second, highest rank")],
          "Each retry frees the cache and waits for the device."),
    Panel("Out-of-memory errors", "none",
          [Query(f"sum by ({RANK}) ({of_run('torch_train_memory_out_of_memory_total')})", f"rank {{{{{RANK}}}}}")],
          "Including errors that the job has caught."),
]  # fmt: skip

_CLOCK = (
    'hw_gpu_clock_frequency_hertz{hw_gpu_clock="sm"} / hw_gpu_clock_limit_hertz{hw_gpu_clock="sm"}'
)
_NETWORK = (
    f"{rate('hw_network_io_bytes_total')} / on (job, instance, hw_id) "
    "group_left () hw_network_bandwidth_limit_bytes_per_second"
)
GPU, PORT = "{{instance}} {{hw_id}}", "{{instance}} {{hw_id}} {{network_io_direction}}"
HARDWARE = [
    Panel("SM utilization", "percentunit", [Query(f"bottomk(8, {of_run('hw_gpu_sm_utilization_ratio')})", GPU)],
          "The eight least utilized GPUs. A GPU far below the others is starved.", width=24),
    Panel("GPU utilization", "percentunit", [Query(f"bottomk(8, {of_run('hw_gpu_utilization_ratio')})", GPU)],
          "Share of the time with any kernel. SM utilization is the better measure."),
    Panel("Tensor core utilization", "percentunit",
          [Query(f"bottomk(8, {of_run('hw_gpu_tensor_utilization_ratio')})", GPU)],
          "The eight least utilized GPUs."),
    Panel("SM clock, share of the maximum", "percentunit",
          [Query(f"bottomk(8, {of_run(_CLOCK)})", GPU)], "The eight slowest GPUs."),
    Panel("Clock throttling", "percentunit",
          [Query(f"topk(8, {of_run(rate('hw_gpu_throttle_duration_seconds_total'))} > 0)",
                 GPU + " {{hw_gpu_throttle_reason}}")],
          "Share of the time, by reason. Reasons may overlap.", nothing="none"),
    Panel("Temperature", "celsius",
          [Query(f"topk(8, {of_run('hw_temperature_celsius')})", GPU + " {{hw_sensor_location}}")],
          "The eight hottest sensors."),
    Panel("Power", "watt",
          [Query(f"max({of_run('hw_power_watts')})", "highest"), Query(f"min({of_run('hw_power_watts')})", "lowest"),
           Query(f"max({of_run('hw_power_limit_watts')})", "limit")],
          "A GPU far below the others waits or is throttled."),
    Panel("GPU memory in use", "percentunit",
          [Query(f"topk(8, {of_run('hw_gpu_memory_usage_bytes / hw_gpu_memory_limit_bytes')})", GPU)],
          "Of all processes."),
    Panel("Errors", "none",
          [Query(f"topk(16, {of_run('increase(hw_errors_total[$__range])')} > 0)", GPU + " {{error_type}}")],
          "Errors of GPUs and ports in the time range of the dashboard.", "table", "none"),
    Panel("GPU links", "Bps",
          [Query(f"sum by (hw_gpu_link, network_io_direction) ({of_run(rate('hw_gpu_io_bytes_total'))})",
                 "{{hw_gpu_link}} {{network_io_direction}}")], "PCIe and NVLink, summed over all GPUs."),
    Panel("Network utilization", "percentunit",
          [Query(f"topk(8, {of_run(_NETWORK)})", PORT)],
          "Share of the link rate, of the eight busiest ports."),
    Panel("Network ports down", "none", [Query(f"count({of_run('hw_network_up')} == 0)")], "", "number", "none"),
]  # fmt: skip

DASHBOARDS: dict[str, tuple[str, Sequence[Panel]]] = {
    "job": ("Job", JOB),
    "ranks": ("Ranks", RANKS),
    "collectives": ("Collectives", COLLECTIVES),
    "memory": ("Memory", MEMORY),
    "hardware": ("Hardware", HARDWARE),
}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else DEPLOY
    for path, text in files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        print(folder / path)


def files() -> dict[str, str]:
    """Return the contents of each generated file by its path below torchlens_perf/deploy."""
    found = {
        f"grafana/torchlens-{name}.json": (
            json.dumps(json.loads(_json(name, *of)), indent=1, sort_keys=True) + "\n"
        )
        for name, of in DASHBOARDS.items()
    }
    rules = (DEPLOY / "prometheus" / "alerts.yaml").read_text()
    found["kubernetes/prometheus-rule.yaml"] = _RULE + "".join(
        f"  {line}\n" if line else "\n" for line in rules[rules.index("groups:") :].splitlines()
    )
    return found


_RULE = """# prometheus/alerts.yaml as the Prometheus Operator wants it; scripts/make_dashboards.py writes it.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: torchlens-perf
spec:
"""


def _json(name: str, title: str, panels: Sequence[Panel]) -> str:
    made = (
        dashboard.Dashboard(f"Training: {title}")
        .uid(f"torchlens-{name}")
        .tags(["torchlens-perf", "pytorch"])
        .description("Written by torchlens_perf: scripts/make_dashboards.py.")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(
            _variable(
                "job", "Scrape job", 'label_values(target_info{torch_run_id!=""}, job)', multi=True
            )
        )
        .with_variable(
            _variable(
                "run", "Run", 'label_values(target_info{job=~"$job"}, torch_run_id)', multi=False
            )
        )
    )
    if any("$rank" in query.expression for panel in panels for query in panel.queries):
        values = f'label_values(torch_train_steps_total{{job=~"$job"}}, {RANK})'
        made = made.with_variable(_variable("rank", "Rank", values, multi=True))
    for panel in panels:
        made = made.with_panel(_panel(panel))
    made = made.link(
        dashboard.DashboardLink("Training")
        .type("dashboards")
        .tags(["torchlens-perf"])
        .include_vars(True)
        .keep_time(True)
    )
    return JSONEncoder(sort_keys=True).encode(made.build())


def _variable(name: str, label: str, values: str, *, multi: bool) -> dashboard.QueryVariable:
    found = (
        dashboard.QueryVariable(name).label(label).datasource(SOURCE).query(values)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).sort(VariableSort.NUMERICAL_ASC)
    )  # fmt: skip
    return found.multi(True).include_all(True).all_value(".*") if multi else found


def _panel(panel: Panel) -> Any:
    kinds: dict[str, Any] = {
        "lines": timeseries, "stack": timeseries, "number": stat, "states": statetimeline, "heat": heatmap,
        "table": table,
    }  # fmt: skip
    made = (
        kinds[panel.kind].Panel().title(panel.title).description(panel.what).datasource(SOURCE).unit(panel.unit)
        .span(panel.width).height(4 if panel.kind == "number" else HEIGHT)
    )  # fmt: skip
    if hasattr(made, "no_value"):
        made = made.no_value(panel.nothing)
    if panel.kind in ("lines", "stack"):
        legend = (
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        made = (
            made.legend(legend)
            .min(0)
            .line_width(1)
            .fill_opacity(60 if panel.kind == "stack" else 0)
        )
    if panel.kind in ("lines", "stack") and any(
        f"{{{{{PHASE}}}}}" in query.legend for query in panel.queries
    ):
        for phase, part in theme.PARTS.items():
            color = {"mode": "fixed", "fixedColor": part.color.dark}
            made = made.override_by_regexp(
                f"(.* )?{phase}$", [DynamicConfigValue(id_val="color", value=color)]
            )
    if panel.kind == "stack":
        made = made.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().expr(query.expression).ref_id(chr(ord("A") + index))
        if query.legend:
            target = target.legend_format(query.legend)
        if panel.kind == "heat":
            target = target.format(PromQueryFormat.HEATMAP)
        if panel.kind == "table":
            target = target.instant().format(PromQueryFormat.TABLE)
        if "_bucket" in query.expression and panel.kind == "lines":
            target = target.exemplar(True)
        made = made.with_target(target)
    return made


if __name__ == "__main__":
    main()
