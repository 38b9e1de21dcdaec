"""Keep pyarrow from importing pandas in processes that do not need it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


def block_pandas_import() -> None:
    """Let no module of this process import pandas. Only for processes that this package starts.

    pyarrow imports pandas, if it is installed, to make its first array. That takes longer than all
    other work of a sidecar in a short run, and a third of the time of a page. Ctrl-C inside that
    import becomes an AttributeError, so the process would go on.
    """
    if not any(isinstance(finder, _PandasBlocker) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PandasBlocker())


class _PandasBlocker(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("this process has no use for pandas", name=fullname)
