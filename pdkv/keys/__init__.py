"""``python -m pdkv.keys``: keys for side channels that other machines can reach."""
