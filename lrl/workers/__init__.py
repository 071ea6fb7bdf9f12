"""Workers: processes that run a user's code, rewards or an environment, and can be killed alone.

A worker is asked to score a group, or to begin an episode, take a turn and end it. `worker` is
what runs in the process; `process` is its other end; `local` keeps the processes of one machine,
`remote` lends those of other machines to rank 0, and `pool` chooses.

No module here imports torch or a user's code.
"""
