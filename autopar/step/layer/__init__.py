"""What one device runs of a layer under a strategy, and what passes from layer to layer."""
