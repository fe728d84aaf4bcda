"""Functions of torch whose calls are traced in another way."""
