"""Folder that `torchlens-perf run` prepends to PYTHONPATH. Python loads the sitecustomize in this
folder before the user's script.
"""
