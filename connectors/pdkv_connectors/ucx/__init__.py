"""The ucx transport: two-sided, over ucxx (or ucx-py), for stacks without NIXL."""
