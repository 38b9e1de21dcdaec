"""Builds the native recorder and the NCCL plugin. Everything declarative is in pyproject.toml.

Both are optional: without a C compiler the package installs and records through its Python twin, and NCCL's kernels are
not timed (`torchlens-perf doctor` says so). The plugin is no Python module: NCCL loads it.
"""

import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

PACKAGE = "torchlens_perf"
NATIVE = Path(PACKAGE, "native")


class BuildAfresh(build_py):
    """Without what an earlier build has left in `build/`: a module that has moved would be in the wheel twice."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)
        super().run()


def extension(name, sources, *warnings):
    return Extension(
        f"{PACKAGE}.{name}",
        sources=sorted(map(str, sources)),
        depends=sorted(map(str, NATIVE.glob("*.h"))),
        # No debugging symbols: they hold the paths of the machine that builds.
        extra_compile_args=["-std=gnu11", "-fvisibility=hidden", "-g0", *warnings],
        optional=True,
    )


plugin = set(NATIVE.glob("nccl_*.c"))
setup(
    cmdclass={"build_py": BuildAfresh},
    ext_modules=[
        extension("_native", set(NATIVE.glob("*.c")) - plugin, "-Wall"),
        extension("_nccl_profiler", plugin, "-Wall", "-Wextra"),
    ],
)
