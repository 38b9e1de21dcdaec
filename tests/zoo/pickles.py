"""Pickle objects of classes in __main__, and load them here and in another Python process."""
import pickle
import subprocess
import sys


class State:
    def __init__(self, step):
        self.step = step

    def __eq__(self, other):
        return type(other) is type(self) and self.step == other.step


def reduce(value):
    return value + 1


if __name__ == "__main__":
    text = pickle.dumps([State(3), reduce, State])
    print(text, pickle.loads(text) == [State(3), reduce, State])
    again = subprocess.run(
        [sys.executable, "-c", f"import pickle\nfrom pickles import *\nprint(len(pickle.loads({text!r})))"],
        capture_output=True,
        text=True,
    )
    print(again.stdout, again.stderr, again.returncode)
