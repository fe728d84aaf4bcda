"""Trainers of other projects, extended as those projects extend themselves; their packages are optional.

Nothing is imported here: ``autopar.integrations.transformers`` needs transformers and accelerate, and so on.
"""
