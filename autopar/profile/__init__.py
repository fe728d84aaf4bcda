"""``python -m autopar.profile``: measures this machine and the links between its processes, for plans to go by.

Alone it measures ops; under ``torchrun`` collectives too, on the live process group.  What it stores is what
`autopar.parallelize` reads on such a machine (see ``docs/profile.md``).
"""
