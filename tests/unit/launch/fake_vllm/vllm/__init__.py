"""A stand-in for vLLM: the launcher starts the module below by its name."""
