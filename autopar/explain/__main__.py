"""``python -m autopar.explain``."""

import sys

from autopar.explain.cli import main
from autopar.host.garbage import collected_seldom

with collected_seldom():
    sys.exit(main())
