"""Cutting a program into layers, and finding the layers that run the same."""
