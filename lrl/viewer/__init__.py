"""Looking at the rollouts of a run in a browser, `lrl view`.

Hides the form of `rollouts.jsonl`, the server, and its page. It imports no torch.
"""
