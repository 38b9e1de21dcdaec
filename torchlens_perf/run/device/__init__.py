"""What both processes must know alike of a device: the parts of its steps, and the windows merged over ranks."""
