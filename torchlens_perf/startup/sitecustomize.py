"""Install an import finder that starts recording after the import of torch or openai.

Python loads this module before the script of `torchlens-perf run`, because commands/run.py has
prepended this folder to PYTHONPATH. This module restores PYTHONPATH and then loads the
sitecustomize module that Python would otherwise have loaded.

Until one of them is imported, sys.modules must be the same as without this package. Therefore this module
does not even import `typing` or `__future__`.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec, SourceFileLoader
    from types import ModuleType

FOLDER = os.path.dirname(os.path.abspath(__file__))
# Variable with the user's own PYTHONPATH; not set if the user has none.
USERS_PATH = "_TORCHLENS_PERF_PYTHONPATH"


class TorchImportHook:
    """Import finder that starts recording after the import of torch, even without torch's autoload.

    A process that imports openai and not torch may be an agent of a job with roles.

    The finder stays in sys.meta_path. Removing it during an import would make that import skip the
    next finder.
    """

    _asks = False

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the spec of torch or openai, whose loader then starts recording; None for others."""
        if fullname not in ("torch", "openai") or target is not None or self._asks:
            return None
        import importlib.machinery
        import importlib.util

        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        except Exception:
            return None  # The import repeats the search, and the script gets its error.
        finally:
            self._asks = False
        if spec is None or spec.submodule_search_locations is None:
            return None
        if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            _autoload_after_import(spec.loader)
        return spec


def _autoload_after_import(loader: "SourceFileLoader") -> None:
    load: Callable[[ModuleType], None] = loader.exec_module

    def load_and_arm(module: "ModuleType") -> None:
        vars(loader).pop("exec_module", None)  # Restore the loader to its earlier state.
        load(module)
        _autoload_or_report(loader.name)

    # If the import of torch fails, the traceback must not show this function. CPython omits frames
    # with this file name from tracebacks of imports.
    load_and_arm.__code__ = load_and_arm.__code__.replace(
        co_filename="<frozen importlib._bootstrap>"
    )
    loader.exec_module = load_and_arm  # type: ignore[method-assign]


def _autoload_or_report(imported: str) -> None:
    try:
        from torchlens_perf.autoload import autoload
    # A broken installation of this package must not stop the script.
    except Exception as error:
        # Use sys.__stderr__, because the script may have replaced sys.stderr, and
        # torchlens_perf.output may be broken too.
        if os.environ.get("LOCAL_RANK", "0") == "0" and sys.__stderr__ is not None:
            line = ascii(f"torchlens_perf is off: {type(error).__name__}: {error}")[1:-1]
            try:
                sys.__stderr__.write(line + "\n")
            except (OSError, ValueError):
                return
    else:
        autoload(imported)


def _restore_paths() -> None:
    """Restore PYTHONPATH and sys.path."""
    if USERS_PATH in os.environ:
        os.environ["PYTHONPATH"] = os.environ.pop(USERS_PATH)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if entry != FOLDER]
    sys.path_importer_cache.pop(FOLDER, None)


if __name__ == "sitecustomize":
    _restore_paths()
    sys.meta_path.insert(0, TorchImportHook())
    del sys.modules["sitecustomize"]
    # Load the next sitecustomize on sys.path. Without one, this raises the ImportError that Python
    # expects.
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401
