"""Run the command `dta` as `python -m dta_compile`."""

import sys

from dta_compile.cli import main

if __name__ == "__main__":
    sys.exit(main())
