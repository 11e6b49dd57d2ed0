"""Programs around sizing: ``python -m pdkv.sizing sweep`` finds the smallest margins that hold for a workload.

The formula that the margins belong to is in :mod:`pdkv.kvcache.sizing`.
"""
