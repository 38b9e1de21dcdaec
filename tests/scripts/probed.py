"""Record steps, phases and collectives of known durations, and print nothing.

usage: probed.py FOLDER
"""

import sys
from pathlib import Path

from tests.support.collective_rig import CollectiveRig
from torchlens_perf.recorder.recorder import EndDetection
from torchlens_perf.run.ring import Kind

STEPS = 3


def main(folder: Path) -> None:
    rig = CollectiveRig(folder)
    for step in range(STEPS):
        rig.span(Kind.FORWARD, "forward", 100 + step)
        # Modules and sections have no probes.
        rig.span(Kind.MODULE, "layer", 5)
        rig.span(Kind.SECTION, "part", 5)
        rig.span(Kind.OPTIMIZER, "optimizer", 200 + step)
        rig.call(10 + step, EndDetection.UNKNOWN, call_ns=7, group=4, size=4096 + step)
        rig.clock.advance(1000)
        rig.recorder.next_step()
    rig.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
