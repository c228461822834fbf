"""From a prompt to a text: KV cache, sampling, stop texts, scores. Start in `generate.py`."""
