"""HTML pages with figures and tables in one file, which loads nothing from the network."""
