"""Lightning strategies that divide a job's devices between the trainer and the generators.

Hides when generators start and stop, and how a run ends that is told to.
"""
