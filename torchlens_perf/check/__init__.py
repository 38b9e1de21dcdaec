"""Check nodes, devices, links and storage before a job (`torchrun ... -m torchlens_perf check`).

No process of a job imports this package, but for `mlperf.py` where the user asks for it. `runner.py`
measures in the processes of a launcher, `judge.py` and `links.py` conclude, and `baseline.py` keeps the
result for later checks and jobs. `loader.py` measures the storage of a dataset and its DataLoader.
"""
