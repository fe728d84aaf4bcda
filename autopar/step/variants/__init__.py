"""The program that a plan runs: the traced one, changed as the plan decides."""
