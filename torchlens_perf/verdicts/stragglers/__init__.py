"""The straggler detector: slow ranks, their first slow step, their slow phase and their cost."""
