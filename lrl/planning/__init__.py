"""What a run will cost: a search over plans from data sheets, and a simulator with the real
controller on a virtual clock. No run imports it.
"""
