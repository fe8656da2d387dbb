"""`python -m benchmarks.convergence`."""

from benchmarks.convergence.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
