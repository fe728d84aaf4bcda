"""``python -m autopar.explain``."""

import sys

from autopar.explain.cli import main

sys.exit(main())
