"""`torchrun --logs-specs torchlens_perf`: switch recording on in the workers.

Runs in torchrun's own process.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs

from torchlens_perf.autoload import AUTOLOAD_SWITCH, is_autoload_off
from torchlens_perf.config import SWITCH
from torchlens_perf.output import write_to_stderr


class LogsSpecs(DefaultLogsSpecs):  # type: ignore[misc] # torch is not followed
    """torchrun's default log handling.

    It is created before the workers, which inherit the variable set here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if is_autoload_off(os.environ):
            write_to_stderr(
                f"torchlens_perf is off: {AUTOLOAD_SWITCH}={os.environ[AUTOLOAD_SWITCH]} keeps it"
                " out of the workers; unset it, or use `torchrun -m torchlens_perf run SCRIPT`\n"
            )
        elif SWITCH not in os.environ:
            os.environ[SWITCH] = "1"
