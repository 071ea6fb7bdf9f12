"""Services of the process and the machine that know nothing of learning: signals, processes, cores,
clocks, TLS.

Hides the details of Linux and of Lightning's internals.
"""
