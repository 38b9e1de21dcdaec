"""Count all blocking calls of the driver and the runtime by CUPTI's callbacks.

torch.profiler records the runtime's calls, which torch makes, and few of the driver's, which the
watch and CuPy make. CUPTI's callbacks are enabled only for blocking functions. The callbacks miss
an asynchronous copy that waits because its host memory is pageable. torch.profiler records such
copies (cost.synchronizations).
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DRIVER, _RUNTIME, _RESOURCE = 1, 2, 3  # CUpti_CallbackDomain
_MODULE_LOADED, _MODULE_UNLOADED = 6, 7  # CUpti_CallbackIdResource
# Neither API has that many functions.
_MOST_FUNCTIONS = 2000
# By kind of call: a pattern of function names without version and "Async".
KINDS = {
    "synchronize": r"cu(da)?(Ctx|Stream|Event|Device|Thread)Synchronize",
    "device memory": (
        r"cuMem(Alloc(Pitch|Managed)?|Free|Create|Map|Unmap|Release)"
        r"|cuda(Malloc(Pitch|Array|3D|3DArray|Managed)?|Free(Array)?)"
    ),
    "host memory": (
        r"cuMem(AllocHost|HostAlloc|FreeHost|HostRegister|HostUnregister)"
        r"|cuda(MallocHost|HostAlloc|FreeHost|HostRegister|HostUnregister)"
    ),
    "module": (
        r"cu(Module(Load\w*|Unload)|Library(Load\w*|Unload)|LinkComplete)|cudaLibrary(Load\w*|Unload)"
    ),
    "blocking copy": (
        r"cu(da)?Memcpy(?!Batch|\w*Async)\w*|cuMemset(?!\w*Async)\w*|cudaMemset(?!\w*Async)\w*"
    ),
}
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class CallbackData(ctypes.Structure):
    """The first fields of CUpti_CallbackData."""

    _fields_ = (("site", ctypes.c_int), ("function_name", ctypes.c_char_p))


def kind_of(function: str) -> str | None:
    """Return the kind of wait of a driver or runtime function, or None if it does not wait.

    None if it does not wait.
    """
    name = re.sub(r"(_v\d+|_ptsz|_ptds)+$", "", function)
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), None)


def library() -> str | None:
    """Return the path of torch's own CUPTI, because another version may not support this driver."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "libcupti" in path:
            return path
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or ())
    return next(
        (str(path) for folder in folders for path in sorted(Path(folder).rglob("libcupti.so*"))),
        None,
    )


class Calls:
    """Counts calls. Raises RuntimeError or OSError without CUPTI."""

    def __init__(self, path: str | None = None) -> None:
        """Load CUPTI from its library's path."""
        path = path or library()
        if path is None:
            raise RuntimeError("there is no CUPTI with this torch")
        self._cupti = ctypes.CDLL(path)
        self._on = False
        self._counts: Counter[str] = Counter()
        # Keep a reference to the callback, because CUPTI stores the callback's address.
        self._callback = _CALLBACK(self._called)
        self._subscriber = ctypes.c_void_p()
        self._ask("cuptiSubscribe", ctypes.byref(self._subscriber), self._callback, None)
        for domain in (_DRIVER, _RUNTIME):
            for number in range(1, _MOST_FUNCTIONS):
                name = self._name(domain, number)
                if name and kind_of(name):
                    self._enable(self._subscriber, domain, number)
        for number in (_MODULE_LOADED, _MODULE_UNLOADED):
            self._enable(self._subscriber, _RESOURCE, number)

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *error: object) -> None:
        """Unsubscribe, because CUPTI would call into a Python that has ended."""
        self._ask("cuptiUnsubscribe", self._subscriber)

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Yield a counter of the calls inside the context by "kind: function"."""
        self._counts = counts = Counter()
        self._on = True
        try:
            yield counts
        finally:
            self._on = False

    def _called(self, _: int | None, domain: int, number: int, data: int | None) -> None:
        """Count a call. CUPTI calls this function on any thread, inside the counted call."""
        if not self._on:
            return
        if domain == _RESOURCE:
            self._counts["module: loaded" if number == _MODULE_LOADED else "module: unloaded"] += 1
        elif data:
            call = CallbackData.from_address(data)
            # Do not count the call again at its end.
            if call.site == 0:
                name = (call.function_name or b"").decode()
                self._counts[f"{kind_of(name)}: {name}"] += 1

    def _name(self, domain: int, number: int) -> str:
        name = ctypes.c_char_p()
        status = self._cupti.cuptiGetCallbackName(
            domain, ctypes.c_uint32(number), ctypes.byref(name)
        )
        return name.value.decode() if status == 0 and name.value else ""

    def _enable(self, subscriber: ctypes.c_void_p, domain: int, number: int) -> None:
        self._ask(
            "cuptiEnableCallback", ctypes.c_uint32(1), subscriber, domain, ctypes.c_uint32(number)
        )

    def _ask(self, name: str, *arguments: object) -> None:
        status = getattr(self._cupti, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with CUPTI error {status}")
