"""What touches a transport or an engine: adapters between pdkv and vLLM, NIXL and others."""
