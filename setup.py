"""Builds the native recorder and the NCCL plugin. Everything declarative is in pyproject.toml.

Both are optional: without a C compiler the package installs and records through its Python twin, and NCCL's kernels are
not timed (`torchlens-perf doctor` says so). The plugin is no Python module: NCCL loads it.
"""

from setuptools import Extension, setup

SOURCES = [
    "module.c", "recorder.c", "section.c", "module_call.c", "collective.c", "collective_parts.c",
    "collective_python.c", "thread_time.c", "device.c",
]  # fmt: skip

setup(
    ext_modules=[
        Extension(
            "torchlens_perf._native",
            sources=[f"torchlens_perf/native/{name}" for name in SOURCES],
            depends=[f"torchlens_perf/native/{name}" for name in ("layout.h", "recorder.h", "collective.h")],
            extra_compile_args=["-std=gnu11", "-fvisibility=hidden", "-Wall"],
            optional=True,
        ),
        Extension(
            "torchlens_perf._nccl_profiler",
            sources=[f"torchlens_perf/native/nccl_{name}.c" for name in ("profiler", "operations", "mask")],
            depends=[
                f"torchlens_perf/native/{name}"
                for name in ("nccl_abi.h", "nccl_mask.h", "nccl_operations.h", "collective.h")
            ],
            extra_compile_args=["-std=gnu11", "-fvisibility=hidden", "-Wall", "-Wextra"],
            optional=True,
        ),
    ]
)
