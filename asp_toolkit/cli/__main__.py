"""`python -m asp_toolkit.cli` is `asp`."""

from asp_toolkit.cli import main

main()
