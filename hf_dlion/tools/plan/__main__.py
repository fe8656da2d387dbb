"""`python -m hf_dlion.tools.plan`, for launchers that start a module."""

from hf_dlion.tools.plan.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
