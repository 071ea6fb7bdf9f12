"""Generators: vLLM servers that write with a copy of the policy, and the fleet and the pools they
form. Hides how a server is started, supervised, called over HTTP and replaced after a failure."""
