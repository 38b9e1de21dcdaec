"""Actions on verdicts, with the figures of the run that justify them."""
