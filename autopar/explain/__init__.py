"""Read, question and change plans: ``python -m autopar.explain TARGET --cluster 8x8xh100``."""
