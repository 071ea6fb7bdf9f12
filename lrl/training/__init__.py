"""The policy's numbers: opening a model, log-probs, gradients, the learning rate, the reference policy.

Hides transformers; nothing here knows of generators or rollouts in flight.
"""
