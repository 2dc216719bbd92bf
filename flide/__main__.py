"""``python -m flide``."""

import sys

from flide.cli import main

sys.exit(main())
