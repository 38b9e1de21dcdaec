"""Names of a node's files in a folder of the run directory, such as NODE-000001.parquet."""

from __future__ import annotations

from pathlib import Path

_SUFFIX = ".parquet"


def path_of(folder: Path, node: str, number: int) -> Path:
    """Return the path of a node's file."""
    return folder / f"{node}-{number:06d}{_SUFFIX}"


def files_of(folder: Path, node: str) -> list[Path]:
    """Return a node's files in a folder, the oldest first."""
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if _node(path) == node)


def nodes_of(folder: Path) -> list[str]:
    """Return the nodes that have files in a folder."""
    return sorted(
        {node for path in folder.glob(f"*{_SUFFIX}") if (node := _node(path)) is not None}
    )


def number(path: Path) -> int:
    """Return the number in a file's name."""
    return int(path.stem.rpartition("-")[2])


def _node(path: Path) -> str | None:
    """Return the node in a file's name; None for a file that no node wrote."""
    node, _, digits = path.stem.rpartition("-")
    return node if digits.isdecimal() else None
