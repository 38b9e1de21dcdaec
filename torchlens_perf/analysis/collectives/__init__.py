"""Analysis of collectives over several ranks: late ranks, slow links and hangs."""
