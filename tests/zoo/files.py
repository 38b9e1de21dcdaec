"""Write files next to the script and in the working directory, and import a module."""
import os
import pathlib

import package.part

pathlib.Path("checkpoint.txt").write_text("step 5")
pathlib.Path(__file__).with_suffix(".log").write_text(os.path.relpath(__file__))
print(sorted(os.listdir()), os.path.dirname(os.path.abspath(__file__)) == os.getcwd())
