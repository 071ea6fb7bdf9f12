"""Generators that other processes start, and that join or leave a run (`lrl serve --join`, `--leave`).

Hides how both sides find one another, what is asked of a newcomer, and the files through which they speak.
"""
