"""Why a rank is slow: the metrics that are compared, and the rules."""
