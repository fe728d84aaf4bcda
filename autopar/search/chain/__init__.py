"""The search across layers: a candidate for each, by dynamic programming within a memory limit."""
