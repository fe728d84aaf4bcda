"""What `benchmarks/accuracy.py` compares: each module here has `add_arguments` and `run`."""
