"""Names of metrics that only /metrics exports (docs/guides/prometheus.md)."""

from __future__ import annotations

from torchlens_perf.exporters.semantics import Metric

RANKS_RUNNING = "torch.train.ranks"
LAST_STEP = "torch.train.step.last"
OWN_TIME_SLOWEST = "torch.train.step.own_time.slowest"
OWN_TIME_FASTEST = "torch.train.step.own_time.fastest"
PROCESSES_ENDED = "torch.train.processes.ended"
PROCESS_END = "torch.train.process.end"
PROCESSES_OUT_OF_MEMORY = "torch.train.processes.out_of_memory"
RECORDS_LOST = "torchlens_perf.records.lost"
COLLECTIVES = "torch.collective.operations"
COLLECTIVE_IO = "torch.collective.io"
COLLECTIVE_COMPARED = "torch.collective.compared"
COLLECTIVE_ARRIVED_LAST = "torch.collective.arrived_last"
COLLECTIVE_LAG = "torch.collective.lag"
COLLECTIVE_WAIT = "torch.collective.wait"
COLLECTIVE_OPERATION = "torch.collective.operation"
# Metric of the open alerts. Most labels of this metric are attributes of alerts in semantics.py.
OPEN_ALERT = "torch.train.alert"
ALERT_KIND = "torch.train.alert.kind"

METRICS = (
    Metric(OPEN_ALERT, "gauge", "", (), "1 for each open alert, with its rank and cause as labels"),
    Metric(RANKS_RUNNING, "up-down counter", "{rank}", (), "Ranks of this node with a running process"),
    Metric(LAST_STEP, "gauge", "{step}", (), "The step that all running ranks of this node have finished"),
    Metric(OWN_TIME_SLOWEST, "gauge", "s", (), "Mean own time per step of this node's slowest rank over recent steps"),
    Metric(OWN_TIME_FASTEST, "gauge", "s", (), "Mean own time per step of this node's fastest rank over recent steps"),
    Metric(PROCESSES_ENDED, "counter", "{process}", (), "Ended processes of this node, by the way they ended"),
    Metric(PROCESSES_OUT_OF_MEMORY, "counter", "{process}", (), "Processes whose device has run out of memory"),
    Metric(COLLECTIVES, "counter", "{operation}", (), "Collectives that this node's ranks have issued"),
    Metric(COLLECTIVE_IO, "counter", "By", (), "Bytes of the tensors in these collectives"),
    Metric(COLLECTIVE_COMPARED, "counter", "{operation}", (), "Collectives whose last rank is known"),
    Metric(COLLECTIVE_ARRIVED_LAST, "counter", "{operation}", (), "Collectives in which the rank arrived last"),
    Metric(COLLECTIVE_LAG, "counter", "s", (), "Lag of the rank behind the previous rank when it arrived last"),
    Metric(COLLECTIVE_WAIT, "counter", "s", (), "Time blocked in collectives until the last rank arrived"),
    Metric(RECORDS_LOST, "counter", "{record}", (),
        "Records that were overwritten before they were read, or could not be stored"),
)  # fmt: skip
"""The metrics in the order of the response."""
