"""Parse arguments with argparse, whose usage message contains the program's name."""
import argparse

parser = argparse.ArgumentParser(description="trains")
parser.add_argument("--steps", type=int)
print(parser.parse_args())
