"""Services of the process and the machine that know nothing of learning: signals, files, cores, clocks, errors.

Hides the details of Linux, of Lightning's internals and of torch.distributed.
"""
