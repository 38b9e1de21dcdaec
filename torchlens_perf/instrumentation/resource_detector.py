"""Add rank, node and job to the resource of the user's own spans and metrics.

OpenTelemetry loads this module by the entry point `opentelemetry_resource_detector`.

::

    OTEL_EXPERIMENTAL_RESOURCE_DETECTORS=torchlens_perf opentelemetry-instrument torchrun train.py

The attributes have the same names as on this package's own spans, so backends can group by them.
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
        """Return the attributes that are known before torch.distributed is initialized."""
        with guard("detecting the OpenTelemetry resource"):
            return Resource(collect_resource_attributes(os.environ))
        return Resource.get_empty()

    def is_process_dependent(self) -> bool:
        """Return True, because a forked child has another process id."""
        return True


def collect_resource_attributes(environ: Mapping[str, str]) -> dict[str, str | int]:
    """Return attributes of this process. OpenTelemetry's names are used if they exist.

    Such names are host.name, process.pid and k8s.*. OpenTelemetry has no names for ranks and Slurm.
    Attributes that no launcher provides are left out, because this process may be the launcher. The
    run id is included if TORCHLENS_PERF_RUN_ID, Slurm or Open MPI define it.
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
