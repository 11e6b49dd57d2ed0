"""A decode engine to measure transfers beside: vLLM itself, with random weights, in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
CONTEXT = 4096
LARGEST_PREFILL = 8192
KV_NBYTES_OF_TOKEN = 32 * 2 * 8 * 128 * 2  # layers, K and V, heads, head size, bytes: of LLAMA_8B in bfloat16


class DecodeEngine:
    """Requests that decode without end, as vLLM is started without further options.

    Args:
        folder: where the model's configuration is written.
        context: tokens of each request's prompt.
        steps: decode steps that will be asked for at most.
        options: of `vllm.LLM`, in place of those here.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shape: dict[str, Any] = LLAMA_8B,
        batch: int = 32,
        context: int = CONTEXT,
        steps: int = 500,
        **options: Any,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else its steps are another process's
        from vllm import LLM

        folder.mkdir(parents=True, exist_ok=True)
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **shape}
        (folder / "config.json").write_text(json.dumps(config))
        length = context + steps + 16
        defaults: dict[str, Any] = {
            "dtype": "bfloat16",
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": length,
            "max_num_seqs": batch,
            "max_num_batched_tokens": LARGEST_PREFILL,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.5,
            "kv_cache_memory_bytes": (batch + 1) * length * KV_NBYTES_OF_TOKEN,
            "compilation_config": {"cudagraph_capture_sizes": [batch]},
        }
        self._engine = LLM(str(folder), **{**defaults, **options}).llm_engine
        self._prefill(batch, context, steps, int(shape["vocab_size"]))

    def _prefill(self, batch: int, context: int, steps: int, vocabulary: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps, detokenize=False)
        for number in range(batch):
            tokens = [(7919 * number + 31 * place) % vocabulary for place in range(context)]
            self._engine.add_request(str(number), {"prompt_token_ids": tokens}, params)
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {output.request_id for output in self._engine.step()}

    def step(self) -> None:
        """One token of every request.

        Raises:
            RuntimeError: a request has ended.
        """
        if any(output.finished for output in self._engine.step()):
            raise RuntimeError("the decode engine's requests have come to their end; ask for more steps")
