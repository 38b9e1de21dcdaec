"""Sources of marks: one hook per file, attached for as long as its context is entered."""
