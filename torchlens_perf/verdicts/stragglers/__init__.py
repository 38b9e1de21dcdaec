"""Which ranks are slow, since when, in which part of the step, and what that costs the job."""
