"""Run a Python program on a simulated node.

usage: on_node.py NODE DELAY_S [-m] PROGRAM ARGS...

Needs root.

A node is a pair of namespaces with a separate host name and shared memory. The program's children
run on the same node.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys
import time

_CLONE_NEWNS, _CLONE_NEWUTS, _MS_REC_PRIVATE = 0x20000, 0x4000000, 0x44000


def enter(node: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for done in (
        lambda: libc.unshare(_CLONE_NEWNS | _CLONE_NEWUTS),
        lambda: libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None),
        lambda: libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None),
    ):
        if done():
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    socket.sethostname(node)


if __name__ == "__main__":
    _, name, delay_s, *program = sys.argv
    enter(name)
    # Give each node another clock, because run names made from local time would then differ between
    # nodes.
    os.environ["TZ"] = f"NODE-{1 + sum(name.encode()) % 12}"
    time.tzset()
    time.sleep(float(delay_s))
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")
