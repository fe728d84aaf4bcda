"""A whole step by the actions of its device groups: what memory holds, and when things run."""
