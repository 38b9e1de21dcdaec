"""Where marks come from: one file per source, each attached for as long as its context is entered."""
