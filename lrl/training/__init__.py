"""Computation of the policy: opening a model, log-probs, gradients, the learning rate, the
reference policy.

Hides transformers; nothing here knows generators or rollouts in flight.
"""
