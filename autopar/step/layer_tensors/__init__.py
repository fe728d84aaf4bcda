"""The local tensors of a layer: fused, kept for backward or made again, and how long they live."""
