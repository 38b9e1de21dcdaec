"""What a watch shows of its own run, to whoever asks for it: in a notebook, as values, by callbacks.

Nothing in here is imported before somebody asks. What is shown is made elsewhere: by the sidecar while the run goes on
and at its end, by a child process later. The training process imports no analysis, and reads no file of the run
directory.
"""
