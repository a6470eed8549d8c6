"""``python -m hstree.cli`` is ``hstree``."""

import sys

from .app import main

sys.exit(main())
