"""`python -m asp_toolkit` is `asp`."""

from asp_toolkit.cli import main

main()
