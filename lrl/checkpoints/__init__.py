"""Checkpoints and the folder of a run: files, parts of a sharded one, the newest, and what each
saved thing depends on.

Hides how state is written, so that it can be read again.
"""
