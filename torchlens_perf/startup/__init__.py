"""Folder that `torchlens-perf run` prepends to PYTHONPATH, so that Python loads its sitecustomize
before the script.
"""
