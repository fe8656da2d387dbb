"""The tests, in the folders of what they test.

torch has one thread in each process, unless the environment says otherwise: several processes share
the cores, and a thread that waits for another one's share keeps a core busy.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
