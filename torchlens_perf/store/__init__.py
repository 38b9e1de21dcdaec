"""The Parquet files of a run directory: one writer, one reader.

Start in reader.py and writer.py.
"""
