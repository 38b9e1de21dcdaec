"""Run SQL on the Parquet files of run directories. Start in engine.py."""
