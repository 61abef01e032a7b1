"""`python -m hdet` is the `hdet` command."""

import sys

from hdet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
