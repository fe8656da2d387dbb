"""`python -m hf_dlion.bench`."""

from hf_dlion.bench.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
