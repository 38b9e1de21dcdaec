"""Write and read the Parquet files of a run directory, with writer.py and reader.py."""
