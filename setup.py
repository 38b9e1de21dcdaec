"""Builds the native recorder. Everything declarative is in pyproject.toml.

The extension is optional: without a C compiler the package installs and records through its Python twin
(`torchlens-perf doctor` says which one is in use).
"""

from setuptools import Extension, setup

SOURCES = ["module.c", "recorder.c", "section.c", "module_call.c", "collective.c", "thread_time.c", "device.c"]

setup(
    ext_modules=[
        Extension(
            "torchlens_perf._native",
            sources=[f"torchlens_perf/native/{name}" for name in SOURCES],
            depends=[f"torchlens_perf/native/{name}" for name in ("layout.h", "recorder.h", "collective.h")],
            extra_compile_args=["-std=gnu11", "-fvisibility=hidden", "-Wall"],
            optional=True,
        )
    ]
)
