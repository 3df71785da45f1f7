"""`python -m evalfleet` is the command line."""

try:
    from evalfleet.cli import main

    code = main()
except KeyboardInterrupt:  # while we were being loaded, or about to end
    code = 130

raise SystemExit(code)
