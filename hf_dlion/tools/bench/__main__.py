"""`python -m hf_dlion.tools.bench`."""

from hf_dlion.tools.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
