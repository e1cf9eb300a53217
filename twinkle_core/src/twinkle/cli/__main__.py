"""`python -m twinkle.cli`."""

from twinkle.cli.main import main

raise SystemExit(main())
