"""What touches NIXL itself, without an engine around it."""
