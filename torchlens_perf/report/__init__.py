"""The report on a run: the facts of its nodes as one value, which screens, JSON and other programs are made from."""
