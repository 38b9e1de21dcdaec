"""Write a run's page."""

from __future__ import annotations

from pathlib import Path

from torchlens_perf.errors import RunStoreError
from torchlens_perf.page.document.html import build_document
from torchlens_perf.page.gather.run_contents import DEFAULT_BUDGET_BYTES, gather_contents
from torchlens_perf.run import ownership
from torchlens_perf.run.directory import RunDirectory


def write_page(
    run: RunDirectory,
    path: Path,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    price: float | None = None,
) -> int:
    """Write the page of a run atomically and return its size in bytes.

    price: of an hour of one device.

    Raise RunStoreError if there is no run, or the file cannot be written.
    """
    return write_page_file(path, build_document(gather_contents(run, budget_bytes, price)))


def write_page_file(path: Path, page: str) -> int:
    """Write a page atomically and return its size in bytes.

    Raise RunStoreError if the file cannot be written.
    """
    text = page.encode("utf-8", "replace")
    try:
        ownership.replace_private_file(path, text)
    except OSError as error:
        raise RunStoreError(f"{path} cannot be written: {error.strerror or error}") from None
    return len(text)
