"""Callbacks for frameworks, one file each. docs/guides/frameworks.md has the lines to paste.

A callback provides facts that hooks cannot see: the framework's own step number, when it evaluates
and saves, the total number of steps, and its loggers. A file is imported only by the user and
imports only its own framework. Other frameworks are recorded by watch() without a callback.
"""
