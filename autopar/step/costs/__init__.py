"""Seconds and bytes of layers, parameters, optimizers, stages and rows."""
