"""A folder that `torchlens-perf run` puts in front of PYTHONPATH: Python loads its sitecustomize before the script."""
