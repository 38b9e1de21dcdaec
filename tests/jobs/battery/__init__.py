"""Small programs from public reports, which must do the same with and without a watch.

Each case is a function that trains and returns what it has computed. A case calls `watch`, which is
`torchlens_perf.watch` or an empty context, and knows nothing else of this package.

tests/jobs/test_battery.py compares the output, the results bit for bit, the states of the random
generators, the warnings and the exit code.
"""
