"""Settings as options of `opentelemetry-instrument`: entry point
`opentelemetry_environment_variables`.

::

    opentelemetry-instrument --torchlens_perf_dir /scratch/runs --torchlens_perf_trace_every 10
    torchrun train.py

The tool makes an option of each name here that begins with OTEL_, and sets the variable of that
name. Each setting TORCHLENS_PERF_X therefore also has the name OTEL_PYTHON_TORCHLENS_PERF_X, which
instrumentor.py renames to TORCHLENS_PERF_X. Setting TORCHLENS_PERF_X itself works too.
"""

from __future__ import annotations

from torchlens_perf.config import ENVIRONMENT_PREFIX, EXCHANGE_TOKEN, SWITCH, variables

PREFIX = f"OTEL_PYTHON_{SWITCH}"

VARIABLES = (
    PREFIX,
    *(
        f"OTEL_PYTHON_{variable}" for variable in variables() if variable != EXCHANGE_TOKEN
    ),  # seen in `ps`
    f"OTEL_PYTHON_{ENVIRONMENT_PREFIX}RUN_ID",
)
globals().update({name: name for name in VARIABLES})
