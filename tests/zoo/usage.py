"""argparse says how the program was called."""
import argparse

parser = argparse.ArgumentParser(description="trains")
parser.add_argument("--steps", type=int)
print(parser.parse_args())
