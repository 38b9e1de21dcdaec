#!/bin/sh
# TaskProlog of slurm.conf, or srun --task-prolog=FILE: what it prints as `export NAME=value` is in each task's
# environment. Records every job, and answers Prometheus. What a user has set stays; TORCHLENS_PERF=0 switches it off.
default() {
    eval "[ -n \"\${$1+set}\" ]" || echo "export $1=$2"
}
default TORCHLENS_PERF 1
# Two jobs on one node: the second has no /metrics until the first has ended, and says so in its report.
default TORCHLENS_PERF_PROMETHEUS 0.0.0.0:9464
