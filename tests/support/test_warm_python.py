"""Tests of what a forked program inherits from its parent, and of its end."""

import os
import sys

import pytest

from tests.support.warm_python import WHOLE_END, run

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


_ENDS = """
import atexit, os, sys, torch

_CLASS = '''
import os
class Says:
    def __init__(self, text):
        self.text = text
    def __del__(self, write=os.write):
        write(1, self.text)
'''
exec(_CLASS)
exec(_CLASS, vars(torch))
mine, torch.added = Says(b"own "), torch.Says(b"torch's ")
atexit.register(os.write, 1, b"handler ")
sys.exit(3)
"""


@pytest.mark.parametrize(("whole", "of_torch"), [("", ""), ("1", "torch's ")])
def test_program_deallocates_its_own_objects_and_those_of_torch_on_request(
    whole: str, of_torch: str
) -> None:
    finished = run([sys.executable, "-c", _ENDS], env={**os.environ, WHOLE_END: whole})
    assert (finished.returncode, finished.stderr) == (3, "")
    assert finished.stdout in (f"handler own {of_torch}", f"handler {of_torch}own ")
