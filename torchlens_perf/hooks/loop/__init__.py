"""What the user's loop does: which optimizers step, which models they train, and where a step ends."""
