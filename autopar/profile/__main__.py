"""``python -m autopar.profile``."""

import sys

from autopar.profile.cli import main

sys.exit(main())
