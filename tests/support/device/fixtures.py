"""A device for each test, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.device.fake_device import FakeDevice, compile_driver
from tests.support.device.fake_nccl import compile_nccl
from tests.support.device.fake_nvml import compile_nvml
from tests.support.device.shim_kernels import compile_kernels


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for this CPU."""
    return compile_kernels(tmp_path_factory.mktemp("shim") / "kernels.so")


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver."""
    return compile_driver(tmp_path_factory.mktemp("driver") / "libcuda.so")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake NVML."""
    return compile_nvml(tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")


@pytest.fixture(scope="session")
def nccl_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An NCCL without a GPU."""
    return compile_nccl(tmp_path_factory.mktemp("nccl") / "libnccl.so", "-shared", "-fPIC")


@pytest.fixture
def device(shim_library: Path, driver_library: Path, tmp_path: Path) -> FakeDevice:
    """A device whose clock stands still until the test lets time pass."""
    own = tmp_path / "libcuda.so"  # a library is loaded once a path: a copy has a state of its own
    shutil.copy(driver_library, own)
    return FakeDevice(own, shim_library)
