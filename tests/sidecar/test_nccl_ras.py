"""The sidecar asks NCCL's RAS service. No NCCL runs in these tests.

A server on the loopback interface answers as src/ras/client_support.cc of NCCL 2.30 does. Its texts
are the samples of NCCL's guide (docs/userguide/source/troubleshooting/ras.rst).
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.progress import found, rank
from torchlens_perf.sidecar.hang_witness import nccl_ras
from torchlens_perf.sidecar.hang_witness.words import describe_ras

SUMMARY = """\
NCCL version 2.30.7 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         4       7-8        32        32   RUNNING  INCOMPLETE

Errors
======

"""
DEAD = """\
DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  The missing rank: 21

"""
WARNINGS = """\
Warnings
========

"""
MISMATCH = """\
#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  26 ranks have launched up to operation 6650
  6 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 483072 on node 172.16.64.210
  Rank 2 -- GPU 2 managed by process 483074 on node 172.16.64.210

"""
PIDS = {3487984: 21, 483072: 0, 483074: 2}


@contextmanager
def service(answer: str, *, closes: bool = True) -> Iterator[tuple[int, list[bytes]]]:
    """Serve one connection. Yield the port, and the received lines."""
    received: list[bytes] = []
    answered = threading.Event()

    def serve() -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as lines:
            received.append(lines.readline())
            connection.sendall(b"OK\n")
            received.append(lines.readline())
            connection.sendall(answer.encode())
            if not closes:
                answered.wait(5)

    with socket.create_server(("localhost", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1], received
        answered.set()
        thread.join()


def test_status_is_asked_once_and_read_to_its_end() -> None:
    with service(SUMMARY + DEAD + WARNINGS) as (port, received):
        answer = nccl_ras.ask_ras(port)
    assert received == [b"timeout 3\n", b"verbose status\n"]
    assert answer == f"OK\n{SUMMARY}{DEAD}{WARNINGS}"


def test_late_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "_ANSWER_S", 0.2)
    with service("Job summary\n", closes=False) as (port, _):
        answer = nccl_ras.ask_ras(port)
    assert answer == "OK\nJob summary\n"
    assert describe_ras(found(), answer, 4, {}) == ""


def test_missing_service_gives_no_answer() -> None:
    with socket.create_server(("localhost", 0)) as listening:
        port = listening.getsockname()[1]
    assert [nccl_ras.ask_ras(each) for each in (port, 1 << 20)] == ["", ""]


def test_dead_process_is_named_with_its_rank() -> None:
    """The hang is the one that `found()` makes, whose finding names no rank."""
    answer = SUMMARY + DEAD + WARNINGS
    assert describe_ras(found(), answer, 32, PIDS) == (
        "NCCL's RAS service reports DEAD: 1 job process is considered dead (unreachable via the RAS"
        " network); Process 3487984 on node 172.16.64.213 managing GPU 5, #0-0 (cf264af53edbe986)"
        " INCOMPLETE: Missing communicator data from 1 rank; The missing rank: 21. These processes"
        " are rank 21."
    )
    other = found(rank(1, state="stopped"))
    assert describe_ras(other, answer, 32, PIDS).endswith(" are rank 21, unlike the finding.")


def test_different_counts_of_operations_name_no_rank() -> None:
    """The outliers may be ahead of the other ranks, or behind."""
    text = describe_ras(found(), SUMMARY + WARNINGS + MISMATCH, 32, PIDS)
    assert text.startswith("NCCL's RAS service reports #0-0 (27a079b828ff1a75) MISMATCH: ")
    assert "6 ranks have launched up to operation 6649; Rank 0 -- GPU 0 managed" in text
    assert text.endswith("; and more.")


def test_answer_without_errors_is_shown_but_not_that_of_another_job() -> None:
    answer = SUMMARY + WARNINGS
    assert describe_ras(found(), answer, 32, {}) == (
        "NCCL's RAS service reports no missing process and equal numbers of operations."
    )
    assert describe_ras(found(), answer, 16, {}) == ""
    # Cut off before the warnings, or without a communicator, it shows nothing.
    assert describe_ras(found(), SUMMARY, 32, {}) == ""
    empty = answer.replace("Group     Comms", "No communicator data collected!\n")
    assert describe_ras(found(), empty, 32, {}) == ""
    assert describe_ras(found(), "", 32, {}) == ""
