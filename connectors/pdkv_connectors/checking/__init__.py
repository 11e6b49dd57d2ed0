"""Integrity over transports that do not map each other's memory: sums by the side that has blocks, compared by the side
that gets them.

The hash, the table of sums and the bookkeeping of what was offered are those of `pdkv_connectors.ipc`. Beside them here
are the few questions that two sides ask each other (`wire`), who answers them (`keeper`), a transfer that ends as done
only when what has arrived is what was summed (`transfer`), and the base of transports that do so (`transport`), each of
which brings a channel for the questions.
"""
