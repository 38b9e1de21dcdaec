"""Collectives of several ranks, joined: who came late, which link is slow, who holds up a hang."""
