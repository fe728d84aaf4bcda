"""Steps in which the ranks form groups that run different programs, over one storage of parameters."""
