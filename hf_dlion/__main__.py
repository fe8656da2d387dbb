"""`python -m hf_dlion` is the command `hf-dlion`, also where torchrun starts it."""

import sys

from hf_dlion.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
