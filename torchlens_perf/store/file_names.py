"""Names of a node's files in a folder of the run directory, such as NODE-000001.parquet."""

from __future__ import annotations

from pathlib import Path

_SUFFIX = ".parquet"


def build_file_path(folder: Path, node: str, number: int) -> Path:
    """Return the path of a node's Parquet file with a number."""
    return folder / f"{node}-{number:06d}{_SUFFIX}"


def list_node_files(folder: Path, node: str) -> list[Path]:
    """Return the paths of a node's Parquet files in a folder, oldest first."""
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if _parse_node(path) == node)


def list_nodes(folder: Path) -> list[str]:
    """Return the names of all nodes that have Parquet files in a folder."""
    return sorted(
        {node for path in folder.glob(f"*{_SUFFIX}") if (node := _parse_node(path)) is not None}
    )


def parse_file_number(path: Path) -> int:
    """Return the number in a file's name."""
    return int(path.stem.rpartition("-")[2])


def _parse_node(path: Path) -> str | None:
    """Return the node in a file's name; None if the name has another format."""
    node, _, digits = path.stem.rpartition("-")
    return node if digits.isdecimal() else None
