"""Parts of a device's steps and merged windows, for training processes and sidecars."""
