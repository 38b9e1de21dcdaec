"""Check nodes, devices, links and storage before a job (`torchrun ... -m torchlens_perf check`).

No process of a job imports this package. `runner.py` measures in the processes of a launcher,
`judge.py` and `links.py` conclude, and `baseline.py` keeps the result for later checks and jobs.
"""
