"""`python -m tests.reality --minutes 10 --burners 3`."""

import sys

from tests.reality.campaign import main

sys.exit(main())
