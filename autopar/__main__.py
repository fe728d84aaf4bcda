"""``python -m autopar plan|explain|profile``: runs the console script where it isn't on the path."""

import sys

from autopar.command import main

sys.exit(main())
