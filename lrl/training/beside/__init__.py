"""The models beside the policy: the reference, the teacher and the critics."""
