"""Rank, node and job on the user's own spans and metrics: entry point
`opentelemetry_resource_detector`.

::

    OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=torchlens_perf opentelemetry-instrument torchrun train.py

The names equal those on this package's own spans, so that a backend groups both in the same way.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource, ResourceDetector

from torchlens_perf.errors import guard
from torchlens_perf.run import identity
from torchlens_perf.run.place import launcher
from torchlens_perf.run.processes import read_command_line


class TorchlensPerfResourceDetector(ResourceDetector):
    """Detector that reads the environment and a few files of /proc and /sys.

    It uses neither network nor torch.
    """

    def detect(self) -> Resource:
        """Return the attributes known before torch.distributed is initialised, which may be
        empty.
        """
        with guard("detecting the OpenTelemetry resource"):
            return Resource(collect_resource_attributes(os.environ))
        return Resource.get_empty()

    def is_process_dependent(self) -> bool:
        """Return True, because a forked child has another process id."""
        return True


def collect_resource_attributes(environ: Mapping[str, str]) -> dict[str, str | int]:
    """Return attributes of this process, by OpenTelemetry's names where they exist: host.name,
    process.pid, k8s.*.

    Ranks and Slurm have no names in OpenTelemetry. Attributes that no launcher provides are left
    out, because this may be the launcher itself. The run's id is included if it is known without
    the node's other ranks: from TORCHLENS_PERF_RUN_ID, Slurm or Open MPI.
    """
    place = launcher.detect_place(environ, None, read_command_line(os.getppid()))
    found: dict[str, str | int] = {
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        **identity.collect_job_attributes(environ),
    }
    run_id = identity.run_id_from_environment(environ, place)
    if run_id:
        found[identity.RUN_ID] = run_id
    if place.launcher:
        found[identity.RANK] = found[identity.LENS_RANK] = place.rank
        found[identity.WORLD_SIZE] = found[identity.LENS_WORLD_SIZE] = place.world_size
        found[identity.RESTART_COUNT] = place.attempt
        if place.local_rank is not None:
            found[identity.LOCAL_RANK] = found[identity.LENS_LOCAL_RANK] = place.local_rank
    return found
