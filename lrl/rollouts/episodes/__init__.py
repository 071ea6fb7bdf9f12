"""Episodes: turns of the policy, and between them what an environment writes. Hides turns from
whoever asks for responses, and chat templates from environments."""
