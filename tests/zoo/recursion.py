"""Print the depth at which recursion fails, and fail again with a long traceback."""
depth = 0


def dive():
    global depth
    depth += 1
    dive()


try:
    dive()
except RecursionError:
    print(depth)
dive()
