"""Computation of the policy: opening a model, log-probs, gradients, the learning rate; in `beside`
the reference, the teacher and the critics.

Hides transformers; nothing here knows generators or rollouts in flight.
"""
