"""`python -m tq` is `tq`."""

import sys

from tq.start import main

# A server's processes import this file without being told to run it.
if __name__ == "__main__":
    sys.exit(main())
