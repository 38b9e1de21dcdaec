"""Recognition of the user's training loop: its optimizers, models and ends of steps."""
