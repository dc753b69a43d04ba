"""`python -m dta_compile` is the command `dta`."""

import sys

from dta_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
