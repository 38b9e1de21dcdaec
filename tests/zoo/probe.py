"""Print the properties of the script, the interpreter and the process as JSON."""
import sys

_modules = list(sys.modules)
_names = list(vars())
_depth = 0
_frame = sys._getframe()
while _frame is not None:
    _depth, _frame = _depth + 1, _frame.f_back

import atexit, builtins, gc, json, locale, os, resource, signal, site, threading, warnings


def _kind(value):
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _loader(value):
    return [_kind(value), getattr(value, "name", None), getattr(value, "path", None), getattr(value, "archive", None)]


def _spec(value):
    if value is None:
        return None
    names = ("name", "origin", "parent", "cached", "has_location", "submodule_search_locations", "loader_state")
    return [str(getattr(value, name)) for name in names] + [_loader(value.loader)]


_main_module = sys.modules["__main__"]
print(json.dumps({
    "names in __main__, in order": _names,
    "frames": _depth,
    "is __main__": [__name__, _main_module.__dict__ is globals(), _kind(_main_module)],
    "__file__": globals().get("__file__"),
    "__doc__": __doc__,
    "__package__": __package__,
    "__spec__": _spec(__spec__),
    "__loader__": _loader(__loader__),
    "__builtins__": [_kind(__builtins__), __builtins__ is builtins],
    "__cached__": globals().get("__cached__", "none"),
    "__annotations__": globals().get("__annotations__", "none"),
    "builtins": sorted(vars(builtins)),
    "sys": sorted(vars(sys)),
    "sys.argv": sys.argv,
    "sys.orig_argv": sys.orig_argv,
    "sys.path": sys.path,
    "sys.flags": str(sys.flags),
    "sys._xoptions": sys._xoptions,
    "sys.warnoptions": sys.warnoptions,
    "sys.executable": [sys.executable, sys.prefix, sys.exec_prefix, sys.base_prefix],
    "sys.modules, in order": _modules,
    "sys.meta_path": [_kind(each) if not isinstance(each, type) else each.__qualname__ for each in sys.meta_path],
    "sys.path_hooks": [str(each).partition(" at ")[0] for each in sys.path_hooks],
    "sys.path_importer_cache": list(sys.path_importer_cache),
    "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__,
              sys.unraisablehook is sys.__unraisablehook__, threading.excepthook is threading.__excepthook__,
              sys.gettrace(), sys.getprofile(), sys.breakpointhook is sys.__breakpointhook__],
    "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), gc.get_threshold(), gc.isenabled()],
    "callbacks": [atexit._ncallbacks(), len(gc.callbacks)],
    "hash": hash("torch") if os.environ.get("PYTHONHASHSEED") else None,
    "warnings": [str(each) for each in warnings.filters],
    "site": [site.ENABLE_USER_SITE, site.PREFIXES, hasattr(site, "USER_SITE")],
    "encodings": [sys.getfilesystemencoding(), sys.getfilesystemencodeerrors(), locale.getpreferredencoding(),
                  locale.getlocale()],
    "streams": [[each.encoding, each.errors, each.line_buffering, each.write_through, each.isatty(), each.fileno()]
                for each in (sys.stdin, sys.stdout, sys.stderr)],
    "os.environ": {**os.environ, "and": "no more"},
    "cwd": os.getcwd(),
    "parent": open(f"/proc/{os.getppid()}/comm").read(),
    "session": [os.getsid(0), os.getpgid(0)],
    "umask and nice": [os.umask(0o22), os.nice(0)],
    "affinity": sorted(os.sched_getaffinity(0)),
    "rlimits": [resource.getrlimit(each) for each in range(16)],
    "signals": [str(signal.getsignal(each)).partition(" at ")[0] for each in signal.valid_signals()],
    "signal mask": sorted(map(str, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
    "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
    "descriptors": sorted(os.listdir("/proc/self/fd")),
    "command": [open("/proc/self/cmdline").read(), open("/proc/self/comm").read()],
    "debug": __debug__,
}, indent=1))
