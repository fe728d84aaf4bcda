"""Watches steps as they run: time, memory, kernels, reports."""
