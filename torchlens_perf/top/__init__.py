"""A live run in a terminal. It only rereads the run directory, so it does not affect the job."""
