"""``python -m autopar plan|explain|profile``: the console script, where it is not on the path."""

import sys

from autopar.command import main

sys.exit(main())
