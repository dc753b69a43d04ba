"""The command `python -m benchmarks.balancing`."""

import sys

from benchmarks.balancing.compare import main

sys.exit(main())
