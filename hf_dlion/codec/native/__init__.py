"""The CPU codec in C: `native.c`, compiled at first use, and how it is called."""
