"""`python -m torchlens_perf`: the command line, and the sidecar that a training process starts."""

import sys

if __name__ == "__main__":
    # Beside a job that has just begun, the command line's own imports would be noticed.
    if sys.argv[1:2] == ["sidecar"] and "--lock-descriptor" in sys.argv:
        from torchlens_perf.sidecar.start.wait import main
    else:
        from torchlens_perf.commands.cli import main
    sys.exit(main(sys.argv[1:]))
