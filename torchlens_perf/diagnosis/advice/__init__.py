"""Rules that say what to change, with the figures they rest on."""
