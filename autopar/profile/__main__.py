"""``python -m autopar.profile``."""

import sys

from autopar.profile.command import main

sys.exit(main())
