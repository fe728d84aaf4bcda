"""From a module to a graph of functional ops."""
