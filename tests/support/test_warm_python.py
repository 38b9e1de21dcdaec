"""A program that is forked holds what it was given, and nothing of the process that it was forked from."""

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


def test_no_descriptor_is_held_that_another_may_get() -> None:
    """A socket object that outlived its descriptor closed one of gloo's as the program ended."""
    finished = run([sys.executable, "-c", _HELD])
    assert finished.stdout.splitlines() == ["[]", "[]"], finished
