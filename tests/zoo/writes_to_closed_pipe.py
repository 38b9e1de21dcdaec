"""Print more lines than the reader of the pipe reads."""
for line in range(100_000):
    print("step", line)
