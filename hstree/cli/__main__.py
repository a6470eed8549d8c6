"""``python -m hstree.cli`` is ``hstree``, but for Ctrl-C while the package is imported."""

import sys

from .app import main

sys.exit(main())
