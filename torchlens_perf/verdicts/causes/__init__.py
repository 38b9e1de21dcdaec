"""Causes of slow ranks: the compared metrics, and the rules."""
