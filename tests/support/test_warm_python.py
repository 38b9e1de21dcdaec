"""A forked program inherits only what it was given, and nothing else from its parent."""

import sys

from tests.support.warm_python import run

_HELD = """
import gc, os, socket, warnings
warnings.simplefilter("ignore")  # for what torch has deprecated: each object is looked at
gc.unfreeze()
print([held for held in gc.get_objects() if type(held) is socket.socket and held.fileno() >= 0])
numbers = [number for number in os.listdir("/proc/self/fd") if int(number) > 2]
print([number for number in numbers if os.path.exists(f"/proc/self/fd/{number}")])
"""


def test_no_socket_object_outlives_its_descriptor() -> None:
    """A socket object that outlived its descriptor closed one of gloo's descriptors at the
    program's end.
    """
    finished = run([sys.executable, "-c", _HELD])
    assert finished.stdout.splitlines() == ["[]", "[]"], finished
