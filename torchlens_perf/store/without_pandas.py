"""Prevent pyarrow from importing pandas in processes that do not need pandas."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

# pyarrow.parquet imports clients of remote file systems, which take 3 MB of memory.
_REMOTE = ("pyarrow._s3fs", "pyarrow._gcsfs", "pyarrow._azurefs", "pyarrow._hdfs")
_UNUSED = frozenset(("pandas", *_REMOTE))


def block_pandas_import() -> None:
    """Make every import of pandas fail in this process. Call it only in processes of this package.

    pyarrow imports an installed pandas when it makes its first array. This import takes longer than
    all other work of a sidecar in a short run, and a third of the time to build a page. Ctrl-C
    during the import becomes an AttributeError, and the process would continue.
    """
    if not any(isinstance(finder, _PandasBlocker) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PandasBlocker())


class _PandasBlocker(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname in _UNUSED:
            raise ModuleNotFoundError(f"this process has no use for {fullname}", name=fullname)
