"""A layer as an FX program on local tensors, with recomputation and compilation."""
