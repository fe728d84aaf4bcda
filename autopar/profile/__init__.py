"""``python -m autopar.profile``: measures this machine and the links between its processes, for the prices of plans.

A single process measures ops; under ``torchrun`` it also measures collectives of the process group.
`autopar.parallelize` reads the file that it stores (see ``docs/profile.md``).
"""
