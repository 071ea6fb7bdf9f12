"""Membership of generators and reward hosts that other processes start: they join a live run, and leave it.

Hides how run and joining process find and trust each other, and the HTTP through which they communicate.
"""
