"""The private parts of torch that tracing needs, and the user's own lines in its stacks."""
