"""Print the order in which the objects of __main__ are deleted when Python ends."""
import sys


class Last:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        print("gone:", self.name, "sys" in globals(), sys is not None and sys.is_finalizing())


_private, public = Last("_private"), Last("public")
cycle = Last("cycle")
cycle.itself = cycle
sys.modules["kept"] = Last("in sys.modules")
