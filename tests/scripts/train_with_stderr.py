"""Make training runs one after another, each with another kind of stderr or logging.

Print their run directories.

    usage: train_with_stderr.py FOLDER KIND...

KIND is the name of a function below.
"""

import io
import logging
import os
import sys

import torch

import torchlens_perf as perf
from torchlens_perf.errors import swallowed

REAL = sys.stderr
LOG = logging.getLogger("torchlens_perf")


class WriteOnly:
    """A stream with only write()."""

    def write(self, text):
        return len(text)


class WriteAndFlush(WriteOnly):
    """A stream without isatty()."""

    def flush(self):
        pass


class Raises(WriteAndFlush):
    """An object that raises the same error at every access of an attribute."""

    def __init__(self, error):
        self.error = error

    def write(self, text):
        raise self.error

    def isatty(self):
        raise self.error

    flush = isatty


class RaisesOnFlush(WriteOnly):
    """A stream that accepts text and fails to flush it."""

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


class BrokenHandler(logging.Handler):
    """A handler that raises its errors, unlike logging's own handlers."""

    def emit(self, record):
        raise RuntimeError("the user's handler")


def ordinary():
    return REAL


def none():
    return None


def write_only():
    return WriteOnly()


def write_and_flush():
    return WriteAndFlush()


def closed_file():
    with open(os.devnull, "w") as file:
        pass
    return file


def closed_descriptor():
    descriptor = os.open(os.devnull, os.O_WRONLY)
    stream = io.TextIOWrapper(io.FileIO(descriptor, "w", closefd=False), write_through=True)
    os.close(descriptor)
    return stream


def bytes_io():
    return io.BytesIO()


def string_io():
    return io.StringIO()


def strict_ascii():
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")


def read_only_file():
    return open(os.devnull)


def broken_pipe():
    read, write = os.pipe()
    os.close(read)
    return open(write, "w", closefd=False)


def full_pipe():
    _, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        # A blocking write would wait forever.
        os.set_blocking(write, True)
    return open(write, "w", closefd=False)


def full_pipe_that_does_not_block():
    stream = full_pipe()
    os.set_blocking(stream.fileno(), False)
    return stream


def raises_value_error():
    return Raises(ValueError("I/O operation on closed file"))


def raises_error_of_its_own():
    return Raises(type("Lost", (Exception,), {})())


def raises_recursion_error():
    return Raises(RecursionError())


def raises_on_flush():
    return RaisesOnFlush()


def no_stream_at_all():
    return object()


def broken_handler():
    LOG.addHandler(BrokenHandler())
    return Raises(TypeError("write() argument"))


def handler_on_closed_file():
    LOG.addHandler(logging.StreamHandler(closed_file()))
    # The stream makes handleError() raise TypeError.
    return io.BytesIO()


def handler_in_ascii():
    LOG.addHandler(logging.StreamHandler(strict_ascii()))
    return io.BytesIO()


def handler_that_is_quiet():
    logging.raiseExceptions = False
    LOG.addHandler(logging.StreamHandler(closed_file()))
    return


def no_last_resort():
    logging.lastResort = None
    return WriteOnly()


def train(folder):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with perf.watch(model, optimizer, dir=folder, config=perf.Config(_exit_timeout_s=0.2)) as watch:
        # The error is logged.
        swallowed.add("a hook that fails in a test \N{SNOWMAN}", ValueError("\N{SNOWMAN}"))
        for _ in range(20):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return watch.run_dir


if __name__ == "__main__":
    for kind in sys.argv[2:]:
        handlers, quiet, last = list(LOG.handlers), logging.raiseExceptions, logging.lastResort
        sys.stderr = globals()[kind]()
        try:
            print(kind, train(sys.argv[1]), flush=True)
        finally:
            sys.stderr = REAL
            LOG.handlers[:], logging.raiseExceptions, logging.lastResort = handlers, quiet, last
            swallowed.by_place.clear()
