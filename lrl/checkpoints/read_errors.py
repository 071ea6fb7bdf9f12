"""What `torch.load` and a look into its result raise for a file that is no checkpoint."""

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
