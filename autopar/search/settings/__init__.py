"""What is asked of a search: constraints, the roles of axes that they demand, and limits."""
