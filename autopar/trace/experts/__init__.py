"""Mixtures of experts that a graph computes op by op become one op."""
