"""pdkv inside vLLM: every line that touches vLLM's private API, one file per seam.

=======
==================  ====================================================================================
``settings``        the ``PDKV_*`` environment of an engine, listed in `pdkv.launch.command`
``before_start``    what an engine would refuse of its settings, for the launcher
``compat``          which vLLM versions are known, and a start-up check of every seam
``patches``         the few functions of vLLM that are replaced, each with the version it is for
``plugin``          the entry point that vLLM loads in each of its processes
``placement``       vLLM's KV cache config to pdkv's and back
``backing``         the cache's one allocation, answered from the reservation
``warmup``          a real forward on the committed prefix
``measure``         how many blocks fit beside what warmup really used
``rebind``          committed views in place of capacity views
``utilization``     which share of a card was asked for, and who else is on it
``capacity``        how much address space a worker reserves, and whether its cache can grow at all
``growth``          the order of the above, shared by all workers
``agree``           the engine core's half: one block count for all ranks, the scheduler and the handshake
``report``          what a worker writes of its cache into its status file
``worker``          the worker classes for ``--worker-cls``, by one module path
``cpu_worker``      vLLM's CPU worker, grown
``gpu_worker``      vLLM's CUDA worker, grown
``guard``           the NIXL agent, refusing what is not committed
``facade``          a connector that is built late
``accounting``      what the decode scheduler loaded and what it had to compute again
``nixl``            the connectors for ``--kv-transfer-config``
``nixl_workers``    the stock workers, whose peers' notifications lead to pdkv's leases
``handshake``       what pdkv adds to the stock handshake
``ends``            how requests end on a rank: the endpoints of `pdkv.transfer`, a lock, a thread
``ends_agent``      the same while the NIXL agent goes and another comes
``ends_prefill``    prompts that are kept for decode
``ends_decode``     requests whose KV comes from prefill
``ends_events``     what the scheduler tells the workers, and P tells D through the request
``ends_scheduler``  the scheduler's half of it
``ends_support``    which engines have it
``ends_settings``   their settings
``block_transfers`` READs and WRITEs of block pairs by the stock worker's descriptors
``control``         the side channel between pdkv's engines
``stock_peers``     peers that run stock vLLM
``sleep``           the worker's half of sleep, wake and weight updates
``sleep_backend``   the same on CUDA, for ``--sleep-mode-backend pdkv``
``sleep_engine``    the engine core's half: the gate in front of vLLM's own calls
``sleep_http``      sleep over HTTP, a middleware of the API server
``held``            a refusal with its holders, between processes
``facade_sleep``    the connector's half: the agent that goes, and the one that comes
``agent``           the end of a NIXL agent, as a fence
``serving``         the handshake, replaced and withdrawn; stock peers of push
``status``          JSON files for the launcher
``waiting``         which requests wait on decode for KV, and were refused: the scheduler tells the API server
``refusals``        which failures are the client's, and their HTTP statuses
``http_refusals``   the answer to a refused request
``http``            admission on decode, a middleware of the API server
``http_abort``      giving up a request on prefill by its id, a middleware of the API server
``asgi``            what the middlewares share
==================  ====================================================================================
"""
