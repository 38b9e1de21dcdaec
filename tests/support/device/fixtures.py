"""Fixtures that give each test a device without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.device.fake_device import FakeDevice, compile_driver
from tests.support.device.fake_nccl import compile_nccl
from tests.support.device.fake_nvml import compile_nvml
from tests.support.device.shim_kernels import compile_kernels
from torchlens_perf.recorder import step_callbacks


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the kernels for this CPU."""
    return compile_kernels(tmp_path_factory.mktemp("shim") / "kernels.so")


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the fake driver."""
    return compile_driver(tmp_path_factory.mktemp("driver") / "libcuda.so")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the fake NVML."""
    return compile_nvml(tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")


@pytest.fixture(scope="session")
def nccl_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the fake NCCL."""
    return compile_nccl(tmp_path_factory.mktemp("nccl") / "libnccl.so", "-shared", "-fPIC")


@pytest.fixture
def device(shim_library: Path, driver_library: Path, tmp_path: Path) -> FakeDevice:
    """Yield a device whose clock advances only when the test advances it."""
    # A process loads each path only once, so a copy of the library has its own state.
    own = tmp_path / "libcuda.so"
    shutil.copy(driver_library, own)
    return FakeDevice(own, shim_library)


@pytest.fixture
def each_step_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run throttled callbacks in each step, because the steps of a test are short."""
    monkeypatch.setattr(step_callbacks, "_THROTTLE_NS", 0)
