"""Names of metrics that only /metrics exports (docs/guides/prometheus.md)."""

from __future__ import annotations

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
