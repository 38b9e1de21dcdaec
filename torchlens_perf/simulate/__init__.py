"""Jobs that never ran: recorded noise, planted faults, and the ring files that a job would have left."""
