"""Errors of missing or broken CuPy installations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchlens_perf.cuda import kernels
from torchlens_perf.errors import DeviceError


@pytest.mark.parametrize(
    "line", ["raise RuntimeError('built for CUDA 11')", "import no_such_library_of_cupy"]
)
def test_broken_cupy_is_imported_once_and_raises_the_same_error_again(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any exception at import becomes the same DeviceError at each call."""
    (tmp_path / "cupy.py").write_text(
        f"with open({str(tmp_path / 'imports')!r}, 'a') as file:\n    file.write('x')\n{line}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(kernels, "_import_error", "")
    messages = set()
    for _ in range(3):
        with pytest.raises(DeviceError, match="CuPy cannot be imported: ") as caught:
            kernels.load_kernels(0)
        messages.add(str(caught.value))
    with pytest.raises(DeviceError, match="CuPy cannot be imported: "):
        kernels.raise_shared_memory_limit(0, 8)
    assert len(messages) == 1
    assert (tmp_path / "imports").read_text() == "x"


def test_missing_cupy_is_searched_again_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook may install CuPy later, and the search is fast."""
    monkeypatch.setattr(kernels, "has_cupy", lambda: False)
    monkeypatch.setattr(kernels, "_import_error", "")
    with pytest.raises(DeviceError, match="CuPy is missing"):
        kernels.load_kernels(0)
    assert kernels._import_error == ""
