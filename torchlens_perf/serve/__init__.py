"""The web server: the runs in a folder, each as a page that follows the run.

It reads only run directories.
"""
