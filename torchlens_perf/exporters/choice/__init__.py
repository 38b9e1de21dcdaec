"""Which steps are sent as traces, and which ranks of them: bounded at any size of the job."""
