"""Errors of `torch.load`, and of a look into its result, for a file that is no checkpoint."""

import pickle

READ_ERRORS = (
    RuntimeError,
    OSError,
    EOFError,
    KeyError,
    TypeError,
    AttributeError,
    pickle.UnpicklingError,
)
