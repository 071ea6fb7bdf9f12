"""The planner: a roofline model of both sides, and the search for the best division of a cluster."""
