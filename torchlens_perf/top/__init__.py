"""A live run in a terminal: reads the run directory again and again, and nothing else. The job notices nothing."""
