"""`python -m tests.adversary`. The campaign is a module of its own: processes of a pool cannot
import this one."""

import sys

from tests.adversary.campaign import main

sys.exit(main())
