"""Prints more than anybody reads."""
for line in range(100_000):
    print("step", line)
