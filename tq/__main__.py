"""`python -m tq` is `tq`."""

import sys

from tq.cli import main

sys.exit(main())
