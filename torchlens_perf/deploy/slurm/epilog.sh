#!/bin/sh
# Epilog of slurm.conf, on each node as root when a job has ended: frees the memory of rings that a killed job has left.
# The user's next run on this node would do so; there may be none. While the user still has a process here, nothing is
# touched: it may be another job's.
[ -n "$SLURM_JOB_UID" ] || exit 0
for status in /proc/[0-9]*/status; do
    if grep -q "^Uid:[[:space:]]*$SLURM_JOB_UID[[:space:]]" "$status" 2>/dev/null; then
        exit 0
    fi
done
rm -rf "/dev/shm/torchlens-perf-$SLURM_JOB_UID" # a link is removed, and not followed
exit 0
