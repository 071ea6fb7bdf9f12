"""Members of a run: generators and scorers that others start, and that join and leave it.

Hides how run and member find and trust each other, and the HTTP through which they communicate.
`member` has what a member is, `registry` who is one; `join` is the member's side, `run_members` the
run's.
"""
