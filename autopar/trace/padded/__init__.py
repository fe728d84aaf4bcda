"""Whether a program for padded inputs computes what one for shorter inputs does."""
