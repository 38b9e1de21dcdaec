"""Set a variable that the interactive prompt can read after the script (`python -i`)."""
value = 41
