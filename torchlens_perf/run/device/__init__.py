"""Definitions of device data that the training process and the sidecar share: parts of a step, and
merged windows.
"""
