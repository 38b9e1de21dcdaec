"""Test that a forked program inherits nothing from its parent except what it was given."""

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


def test_socket_objects_close_no_descriptor_of_the_program() -> None:
    """A leftover socket object once closed a descriptor of gloo when the program ended."""
    finished = run([sys.executable, "-c", _HELD])
    assert finished.stdout.splitlines() == ["[]", "[]"], finished
