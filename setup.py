"""Builds the native recorder and the NCCL plugin. Everything declarative is in pyproject.toml.

Both are optional: without a C compiler the package installs, and its commands read and show runs.
Training is not recorded there, which watch() and `torchlens-perf doctor` say. The plugin is no Python
module: NCCL loads it.

For a free-threaded Python none is built, so nothing is recorded: the recorder relies on the GIL, and
importing it would switch that on again.
"""

import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

PACKAGE = "torchlens_perf"
NATIVE = Path(PACKAGE, "native")


class BuildAfresh(build_py):
    """Without what an earlier build has left in `build/`: a module that has moved would be in the
    wheel twice.
    """

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
        # Sums of times may wrap: what a caller gives is not checked at each mark.
        extra_compile_args=["-std=gnu11", "-fvisibility=hidden", "-fwrapv", "-g0", *warnings],
        optional=True,
    )


plugin = set(NATIVE.glob("nccl_*.c"))
free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
setup(
    cmdclass={"build_py": BuildAfresh},
    ext_modules=[]
    if free_threaded
    else [
        extension("_native", set(NATIVE.glob("*.c")) - plugin, "-Wall"),
        extension("_nccl_profiler", plugin, "-Wall", "-Wextra"),
    ],
)
