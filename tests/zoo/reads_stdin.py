"""Read standard input by line, from the file descriptor, and to the end."""
import os
import sys

print(input(), sys.stdin.readline(), os.read(0, 100), sys.stdin.read())
