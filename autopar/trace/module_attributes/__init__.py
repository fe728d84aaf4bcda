"""What a forward reads from its modules, and what it sets there."""
