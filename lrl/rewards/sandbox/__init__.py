"""Where programs of a policy run, and the tests that they run against.

`forms` reads a row's tests. `session` starts a sandbox and asks for runs in it; `bubblewrap` has
its walls. Inside, `runner` is the first process, and `calls` lets the tests, in a process of their
own, call the program.
"""
