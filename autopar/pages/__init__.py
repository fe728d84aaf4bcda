"""Pages for a browser: figures, tables and the file that holds them; they load nothing from anywhere."""
