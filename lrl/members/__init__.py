"""Members of a run: generators and workers that others start, and that join and leave it.

Hides how run and member find and trust each other, and the HTTP through which they communicate.
`registry` says what a member is, and who is one; `join` is the member's side, which `find_run`
leads to the run, `run_members` is the run's, and `launchers` start members.
"""
