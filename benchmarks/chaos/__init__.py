"""Fault injection: real runs of the quickstart's task, broken on purpose, and what is left of them.

    python -m benchmarks.chaos generators|trainer|nodes|sync|rewards [--help]

Every fault is real: a signal to a process, a connection that is cut, a damaged file. `target` is
the run that is broken; it resumes from its own checkpoint, and `recorder` writes its `journal`.
`launch` starts and kills it from outside.
"""
