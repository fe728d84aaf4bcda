"""Text that users write and read: JSON files, messages, quantities, progress, standard output."""
