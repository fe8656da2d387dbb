"""`python -m hf_dlion.study`."""

from hf_dlion.study.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
