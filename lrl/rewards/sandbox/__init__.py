"""Where programs of a policy run, and the tests that they run against.

`forms` reads a row's tests, and `session` starts a sandbox and asks for runs. Inside, `runner` is
the first process, and `calls` lets the tests, in another one, call the program.
"""
