"""See `record`."""

from tests.recordings.record import main

raise SystemExit(main())
