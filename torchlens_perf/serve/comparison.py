"""Compare two runs of the list. Runs in a reader process."""

from __future__ import annotations

import json

from torchlens_perf.compare.comparison import build_comparison, read_compared_run
from torchlens_perf.compare.comparison_json import to_dictionary
from torchlens_perf.report.report_json import to_json_types
from torchlens_perf.serve.live_page import compress_text
from torchlens_perf.store.run_folders import open_run


def comparison_as_json(before: str, after: str) -> bytes:
    """Return the comparison of two runs as compressed JSON, as `compare --json` prints it."""
    sides = [[read_compared_run(open_run(path).path)] for path in (before, after)]
    found = to_json_types(to_dictionary(build_comparison(*sides)))
    return compress_text(json.dumps(found, allow_nan=False))
