"""What is left of a run when parts of it are killed or frozen: real runs of the quickstart's task, broken on purpose.

Every fault is real: a signal to a process, a connection that is cut, a damaged file, a file system without room.

victim.py       the run that is broken; it resumes by itself and writes down what it trains
settings.py     what it is made of
journal.py      its lines
witness.py      the callback and the thread that write them
launch.py       starts it from outside, kills it, looks for what it leaves
faults.py       how a generator or a reward worker is broken from outside
lineage.py      which steps survived, and whether every prompt was trained once
trainer.py  generators.py  sync.py  soak.py      the measurements; proxy.py breaks the connections of a sync
"""
