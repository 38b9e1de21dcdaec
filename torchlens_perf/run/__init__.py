"""Code that training processes and the sidecar of their node share: ring files, the run directory,
the identity of a rank.
"""
