"""`python -m hf_dlion` is the command `hf-dlion`, also under torchrun."""

import sys

from hf_dlion.cli import main

if __name__ == "__main__":
    sys.exit(main())
