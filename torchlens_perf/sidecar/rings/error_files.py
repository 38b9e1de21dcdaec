"""Read the files in which @record of torchrun describes the exception that ended a rank.

The files name exceptions that no watch has seen, for example an exception after the watch. Their
content may come from any program.
"""

from __future__ import annotations

import builtins
import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from torchlens_perf.errors import printable
from torchlens_perf.run import ownership
from torchlens_perf.run.failure import MAX_MESSAGE, Failure, is_about_lost_peer
from torchlens_perf.run.processes import process_age_s
from torchlens_perf.run.rank_facts import decode_path

if TYPE_CHECKING:
    from torchlens_perf.sidecar.rings.source import RingSource

# The file contains a traceback.
_MAX_BYTES = 1 << 20
# torch writes the type and the text of an exception as one string.
_TYPE_AND_MESSAGE = re.compile(r"(?:([A-Za-z_]\w{0,99}): )?(.*)", re.DOTALL)


def add_reported_failures(sources: Iterable[RingSource]) -> None:
    """Add how ranks of a failed run ended after their watch, and what torchrun's files say of it.

    If all ranks have ended normally, the run has not failed, whatever its program does afterwards.
    """
    ended = [source for source in sources if source.settled]
    if not any(source.state.ended in ("died", "failed") for source in ended):
        return
    for source in ended:
        end = source.state.end
        if end is None or end["signal"] is end["exit_code"] is None:
            source.state.end = source.progress.end_observer.read_end()
        if source.state.facts.error_file and source.state.failure is None:
            failure = _read_failure(source)
            if failure is not None:
                source.state.failure, source.state.ended = failure, "failed"


def _read_failure(source: RingSource) -> Failure | None:
    """Return the failure in the rank's error file; None without one."""
    state, path = source.state, decode_path(source.state.facts.error_file)
    try:
        written_ns = os.stat(path, follow_symlinks=False).st_mtime_ns
        text = _find_text(msgspec.json.decode(ownership.read_regular_file(path, _MAX_BYTES)))
    except (OSError, ValueError, RecursionError):
        # ValueError: of an invalid path, of JSON, and of Unicode.
        return None
    if not text or written_ns < time.time_ns() - 1e9 * process_age_s(
        state.identity.process_started
    ):
        return None
    kind, message = _TYPE_AND_MESSAGE.fullmatch(text).groups("")  # type: ignore[union-attr]
    # Its base classes are known if Python has the class.
    classes = getattr(getattr(builtins, kind, None), "__mro__", ())
    return {
        "type": kind,
        "message": printable(" ".join(message.split()))[:MAX_MESSAGE],
        "where": "",
        "step": state.made_steps,
        "phase": "",
        "module": "",
        "exit_code": None,
        "lost_peer": is_about_lost_peer([kind, *(each.__name__ for each in classes)], message),
        "after_watch": state.ended == "closed",
        "unix_ns": written_ns,
    }


def _find_text(value: Any) -> str:
    """Return the text of the error in the format of torchrun; "" without one."""
    for _ in range(2):
        value = value.get("message") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""
