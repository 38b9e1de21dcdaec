"""`python -m torchlens_perf`: the command line, and the entry of all child processes
(run/children.py).
"""

import contextlib
import os
import sys


def _use_search_path_of_parent() -> None:
    """Search modules in the same folders as the parent process.

    Python has put this package's own folder into sys.path, where its modules would shadow top-level
    ones.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    entries = [*os.environ.get("_TORCHLENS_PERF_SEARCH_PATH", "").split("\n"), *sys.path]
    sys.path[:] = dict.fromkeys(each for each in entries if each and os.path.abspath(each) != here)


def _run(arguments: list[str]) -> int:
    """Run a command or one of the internal programs. Return the exit code.

    Each branch imports only its own modules. Importing the whole command line would take CPU time
    from a job that has just started.
    """
    if arguments[:1] == ["sidecar"] and "--lock-descriptor" in arguments:
        from torchlens_perf.sidecar.start import wait

        return wait.main(arguments)
    if arguments[:1] == ["drain"]:
        from torchlens_perf.sidecar.start import drain

        return drain.drain_old_runs(but=arguments[1])
    if arguments[:1] == ["events"]:
        from torchlens_perf.roles import node_reader

        return node_reader.main(arguments)
    if arguments == ["job-store"]:
        from torchlens_perf.sidecar.nodes import job_store

        return job_store.main()
    from torchlens_perf.commands import cli

    return cli.main()


def _main() -> None:
    code = _run(sys.argv[1:])
    if "_TORCHLENS_PERF_CHILD" in os.environ:
        # Threads of C++ libraries (pyarrow, grpc) may abort the process while the interpreter shuts
        # down.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    if not __package__:
        _use_search_path_of_parent()
    _main()
