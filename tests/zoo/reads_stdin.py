"""A script that reads its input by line, whole, and from the descriptor."""
import os
import sys

print(input(), sys.stdin.readline(), os.read(0, 100), sys.stdin.read())
