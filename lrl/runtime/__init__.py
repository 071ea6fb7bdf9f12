"""Services of the process and the machine that know nothing of learning: signals, files, cores, clocks, errors.

Hides what is particular to Linux, to Lightning's internals and to torch.distributed.
"""
