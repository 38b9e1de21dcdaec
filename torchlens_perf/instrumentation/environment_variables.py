"""Define this package's settings as options of `opentelemetry-instrument`.

OpenTelemetry loads this module by the entry point `opentelemetry_environment_variables`.

::

    opentelemetry-instrument --torchlens_perf_dir /scratch/runs --torchlens_perf_trace_every 10
    torchrun train.py

`opentelemetry-instrument` turns each name here that begins with OTEL_ into an option, which sets
the variable of that name. Each setting TORCHLENS_PERF_X therefore also has the name
OTEL_PYTHON_TORCHLENS_PERF_X. instrumentor.py renames this variable to TORCHLENS_PERF_X. Users may
also set TORCHLENS_PERF_X directly.
"""

from __future__ import annotations

from torchlens_perf.config import ENVIRONMENT_PREFIX, EXCHANGE_TOKEN, SWITCH, fields_by_variable

PREFIX = f"OTEL_PYTHON_{SWITCH}"

VARIABLES = (
    PREFIX,
    *(
        f"OTEL_PYTHON_{variable}" for variable in fields_by_variable() if variable != EXCHANGE_TOKEN
    ),  # seen in `ps`
    f"OTEL_PYTHON_{ENVIRONMENT_PREFIX}RUN_ID",
)
globals().update({name: name for name in VARIABLES})
