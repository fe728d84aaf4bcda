"""Communicators, moves between layouts, consensus between ranks, and ranks simulated as threads."""
