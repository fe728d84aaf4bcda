"""Runs a plan on this rank: layers, microbatches, pipeline stages."""
