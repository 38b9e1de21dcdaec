"""Mutation testing of the kernels: change one place at a time and find changes that no test
notices.

    usage: mutate_kernels.py     # in the test environment, about ten minutes

docs/internals/gpu.md contains the results of the last run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "torchlens_perf" / "cuda" / "kernels.cu"
# Regular expression, replacement, and the mistake that the replacement stands for.
MUTATIONS = [
    (r"__syncthreads\(\);", ";", "a barrier is missing"),
    (r"i \+ middle < count", "i + middle + 1 < count", "the last run of neighbours is left out"),
    (
        r"mantissa > bounds\[below \+ half - 1\]",
        "mantissa >= bounds[below + half - 1]",
        "a bound counts in the next bucket",
    ),
    (
        r"below \+= mantissa > bounds\[below\];",
        "",
        "what is above an octave's last bound counts below it",
    ),
    (r"\(count - 1\) / 2", "count / 2", "the upper median"),
    (r"\(present - 1\) / 2", "present / 2", "the upper median of ranks"),
    (r"before \+ until > wanted", "before + until >= wanted", "a quantile one place too low"),
    (r"offset < 32; offset <<= 1", "offset < 16; offset <<= 1", "a scan over half a warp"),
    (r"int offset = 16; offset > 0", "int offset = 8; offset > 0", "a sum over half a warp"),
    (r"k -= chosen\[1\];", ";", "a place that is not made relative"),
    (r"\(oldest \+ i\) & mask", "i & mask", "the ring is read from its beginning"),
    (r"__umul64hi\(value, value\)", "0ull", "squares lose their upper half"),
    (r"other < WARPS; other\+\+", "other < 1; other++", "only the first warp's sums count"),
    (r"row\[SUM_LOST\] = written - count", "row[SUM_LOST] = 0", "losses are not counted"),
    (r"tail\[slot\] = newest;", "", "what was reduced is reduced again"),
    (r"counts\[copy\]\[", "counts[0][", "all warps count in one histogram"),
    (r"opened\[close\] != 0", "true", "a close without an open counts"),
    (r"opened\[close\] = 0;", "", "a span is closed twice"),
    (r"time == 0\.0f \? ~0u", "time == 0.0f ? 0u", "absent ranks deviate by nothing"),
    (r"absent \+ \(present", "(present", "absent ranks count as fast ones"),
    (r"present < 2", "present < 3", "two ranks have no score"),
    (r"fmaxf\(1\.4826f \* mad, min_spread \* median\)", "1.4826f * mad", "no least spread"),
    (r"histogram\[bucket\] = 0;", ";", "the histogram is not cleared"),
    (r"u64 before = 0;", "u64 before = 1;", "a quantile begins at one"),
    (r"squares_1 \+= low >> 32", "squares_1 += low >> 31", "a limb is shifted wrongly"),
    (r"& 0xffffffffull", "& 0x7fffffffull", "a limb loses a bit"),
    (r"-\(i64\)sorted\[0\]", "(i64)sorted[0]", "the smallest merges as the largest"),
    (r"now > since \? now - since : 0", "now - since", "a clock that steps back"),
]


def survives(source: str, folder: Path) -> bool:
    """Return True if the tests pass with these kernels."""
    changed = folder / "kernels.cu"
    changed.write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "tests/cuda/test_kernels.py",
    ]
    environment = {**os.environ, "MUTATED_KERNELS": str(changed)}
    return (
        subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=300
        ).returncode
        == 0
    )


def main() -> None:
    """Print the surviving mutations and the number of detected ones."""
    source = KERNELS.read_text()
    tried, survivors = 0, []
    with tempfile.TemporaryDirectory() as folder:
        if not survives(source, Path(folder)):
            sys.exit("the tests fail with the kernels as they are")
        for pattern, replacement, meaning in MUTATIONS:
            places = list(re.finditer(pattern, source))
            if not places:
                sys.exit(f"no place for: {pattern}")
            for place in places:
                tried += 1
                if survives(
                    source[: place.start()] + replacement + source[place.end() :], Path(folder)
                ):
                    survivors.append(
                        f"line {source.count(chr(10), 0, place.start()) + 1}: {meaning}"
                    )
    print(f"{tried - len(survivors)} of {tried} changes were noticed", *survivors, sep="\n")


if __name__ == "__main__":
    main()
