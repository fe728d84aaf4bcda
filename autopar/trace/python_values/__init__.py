"""What a forward asks in Python of tensors whose values a trace doesn't know."""
