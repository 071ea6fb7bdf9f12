"""The choice of a generator for each request. Hides the order of the waiting requests: `generators`
only enters and leaves the queue."""
