"""Passes that write a graph so that it splits better, and computes the same."""
