"""Lightning strategies that divide a job's devices between the trainer and the generators.

Hides the start and stop of generators, the meeting of ranks and the graceful shutdown.
"""
