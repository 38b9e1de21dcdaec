"""`python -m torchlens_perf`: the command line."""

import sys

from torchlens_perf.cli import main

if __name__ == "__main__":
    sys.exit(main())
