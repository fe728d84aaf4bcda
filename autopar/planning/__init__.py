"""What `autopar.api` does before and around a search: reads arguments, times layers."""
