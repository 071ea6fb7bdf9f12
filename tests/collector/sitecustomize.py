"""Python imports this when a process of the tests starts: its garbage collector looks less often.

They make objects that stay, above all by imports, and with Python's own threshold took a tenth more
of the cores. At the end of a process it looks at all of them again: a program with Lightning took a
core 8.0 s with that, 6.5 without.
"""

import atexit
import gc

gc.set_threshold(20_000, 10, 10)
atexit.register(gc.freeze)
