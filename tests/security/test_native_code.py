"""Tests that native code is loaded only from folders that no other user can write to.

The tests cover the NCCL plugin and the message of the command `doctor`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from torchlens_perf.hooks.collectives import nccl_plugin
from torchlens_perf.recorder import native_tap


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty plugin file of another installation."""
    package = tmp_path / "site-packages" / "torchlens_perf"
    (package / "recorder").mkdir(parents=True)
    for each in (tmp_path / "site-packages", package):
        each.chmod(0o755)
    monkeypatch.setattr(nccl_plugin, "__file__", str(package / "recorder" / "nccl_plugin.py"))
    file = nccl_plugin._plugin_file()
    file.touch(mode=0o755)
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("level", range(3))
def test_plugin_that_other_users_can_change_is_not_used(level: int, plugin: Path) -> None:
    """The plugin's path is not passed to NCCL, and the reason names the file or folder."""
    assert nccl_plugin.find_plugin_file() == plugin
    part = [plugin, *plugin.parents][level]
    part.chmod(0o777)

    assert nccl_plugin.find_plugin_file() is None
    assert (
        nccl_plugin.find_plugin_problem()
        == f"the plugin is not used: {part} can be written by everybody"
    )


def test_missing_plugin_is_reported_as_not_built(plugin: Path) -> None:
    plugin.unlink()
    assert nccl_plugin.find_plugin_file() is None
    assert nccl_plugin.find_plugin_problem() == "the plugin was not built"


def test_different_torch_builds_have_different_tap_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builds differ although they have the same torch version."""
    import torch

    before = native_tap.build_file_name()
    monkeypatch.setattr(torch.version, "git_version", "0123456789abcdef")
    assert native_tap.build_file_name() != before
    assert "0123456789ab" in native_tap.build_file_name()
