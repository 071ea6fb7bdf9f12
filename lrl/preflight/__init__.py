"""The checks of a run before a server starts: what needs more than one object. A class checks its
own settings in its constructor. The first fault ends the run.

`check_trainer` runs before Lightning's own checks, in the policy's `configure_callbacks`; `check_run`
when the strategy sets up its environment, before anything starts.
"""
