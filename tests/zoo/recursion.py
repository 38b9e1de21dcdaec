"""How deep a script can go, and the traceback of going too deep."""
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
