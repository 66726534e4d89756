"""``python -m benchmarks.page``: what ``make performance`` runs."""

import sys

from .document import main

sys.exit(main())
