"""Joins trace, search and lower for `autopar.api` and its neighbors: reads arguments, plans calls, builds modules."""
