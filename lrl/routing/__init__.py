"""The choice of a generator for each request: the queue, the dispatch policies, migration, length prediction.

Hides who waits for what; `rollouts` and `generators` see a queue that is entered and left.
"""
