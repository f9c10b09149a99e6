"""`python -m undrift` is the command line."""

import sys

from undrift.cli import main

sys.exit(main())
