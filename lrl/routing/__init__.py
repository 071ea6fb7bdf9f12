"""The choice of a generator for each request: request queue, dispatch policies, migration, length
prediction.

Hides the order of the waiting requests: `generators` only enters and leaves the queue.
"""
