"""The tests, in the folders of what they test.

torch has one thread in each process, as real ranks have: several processes share the cores, and the
sums of a matrix product depend on the number of threads.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
