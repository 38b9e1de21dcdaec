"""Our settings as `opentelemetry-instrument` knows them: entry point `opentelemetry_environment_variables`.

::

    opentelemetry-instrument --torchlens_perf_dir /scratch/runs --torchlens_perf_trace_every 10 torchrun train.py

It makes an option of each name here that begins with OTEL_, and sets the variable of that name. So each setting
TORCHLENS_PERF_X has a name OTEL_PYTHON_TORCHLENS_PERF_X, which instrumentor.py makes TORCHLENS_PERF_X again. It reads
no other names: TORCHLENS_PERF_X itself works too, as everywhere.
"""

from __future__ import annotations

from torchlens_perf.config import ENVIRONMENT_PREFIX, EXCHANGE_TOKEN, SWITCH, variables

PREFIX = f"OTEL_PYTHON_{SWITCH}"

VARIABLES = (
    PREFIX,
    *(f"OTEL_PYTHON_{variable}" for variable in variables() if variable != EXCHANGE_TOKEN),  # seen in `ps`
    f"OTEL_PYTHON_{ENVIRONMENT_PREFIX}RUN_ID",
)
globals().update({name: name for name in VARIABLES})
