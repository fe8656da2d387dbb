"""`python -m hf_dlion.tools.study`."""

from hf_dlion.tools.study.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
