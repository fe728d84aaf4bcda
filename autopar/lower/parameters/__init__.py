"""Where parameters are stored, how layers get their compute copies, and how models on the meta device get values."""
