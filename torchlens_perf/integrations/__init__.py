"""Callbacks of frameworks, one file each; docs/guides/frameworks.md has the lines to paste.

They are for what a framework knows and no hook sees: its own number of steps, when it evaluates and saves, how many
steps there will be, and its loggers. Nothing here is imported before the user imports it, and each file imports its
framework alone. A framework without callbacks, or without a file here, is recorded by watch() as it is.
"""
