"""Let the server and its readers keep the priority of the tests."""

from __future__ import annotations

import os


def ignore(which: int, who: int, priority: int) -> None:
    pass


os.setpriority = ignore
