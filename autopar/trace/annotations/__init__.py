"""What ops are annotated with: factor options, what autograd saves, temporary memory."""
