"""`python -m evalfleet` is the command line."""

from evalfleet.cli import main

raise SystemExit(main())
