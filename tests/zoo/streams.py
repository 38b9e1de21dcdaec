"""Write bytes and text to both output streams, and end without a flush."""
import sys

sys.stdout.buffer.write(b"\xff\x00bytes\n")
sys.stdout.write("caf\u00e9 \udcff\n" if sys.stdout.errors == "surrogateescape" else "caf\u00e9\n")
print("no newline", end="", file=sys.stderr)
sys.stdout.write("unflushed")
