"""What this process runs on: its accelerator, its share of the host's cores, Python's garbage collector."""
