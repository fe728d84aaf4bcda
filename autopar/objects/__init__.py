"""Python objects that models refer to, as trace and lower both see them: attributes, what they hold, references."""
