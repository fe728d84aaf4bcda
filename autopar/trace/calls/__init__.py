"""Calls of a model: arguments bound to its signature, and containers taken apart into tensors."""
