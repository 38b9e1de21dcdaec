"""What runs on a GPU, or for one. Nothing of it is imported where torch has no device."""
