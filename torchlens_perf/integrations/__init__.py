"""Callbacks for training frameworks. docs/guides/frameworks.md has the lines to paste.

A callback provides facts that hooks cannot see: the framework's own step number, when the framework
evaluates and saves, the total number of steps, and the framework's loggers. Each file imports one
framework and is only imported by the user. watch() records other frameworks without a callback.
"""
