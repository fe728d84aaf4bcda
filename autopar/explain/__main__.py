"""``python -m autopar.explain``."""

import gc
import sys

from autopar.explain.cli import main

# A model of many layers is millions of small objects, nearly all of them in use: looking for cycles among them takes
# a fifth of the time, and finds little.
gc.freeze()
gc.set_threshold(200_000, 20, 100)
sys.exit(main())
