"""The planner: a search over plans for a cluster, from data sheets.

Hides memory, rooflines, layouts and LlamaRL's two problems; it imports no torch.
"""
