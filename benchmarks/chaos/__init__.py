"""Fault injection: real runs of the quickstart's task, broken on purpose, and what is left of them.

    python -m benchmarks.chaos generators|trainer|ranks|nodes|sync|soak|rewards [--help]

Every fault is real: a signal to a process, a connection that is cut, a damaged file, a file system
without room.

target.py      the run that is broken; it resumes from its own checkpoint
recorder.py    its callbacks that write the journal
journal.py     the journal: writing, reading, which steps survived, whether every prompt was trained once
launch.py      a target from outside: its settings, start, kill, leftovers
faults.py      signals to generators and reward workers, and their order
footprint.py   memory, files, threads and processes of a run
generators.py  trainer.py  soak.py    the experiments on a target

ranks.py       the experiment on the ranks of a sharded run; deaths.py has its deaths
nodes.py       the experiment on two machines; second_node.py the other one, orders.py its faults in mid-phase

sync.py        the experiment on syncs
sync_faults.py its plan, and the callback that brings one fault to each sync
proxy.py       breaks the connections of a sync
token_proof.py computes every trained token again

rewards.py     the experiment on rewards; faulty_reward.py has its faults
"""
