"""Python imports this when a process of the tests starts: its garbage collector looks less often.

They make objects that stay, above all by imports, and with Python's own threshold took a tenth more of the cores.
"""

import gc

gc.set_threshold(20_000, 10, 10)
