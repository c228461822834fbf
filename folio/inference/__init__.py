"""From a prompt to a text: the KV cache, sampling, stop texts, scores.

Start reading in `generate.py`, which has the loop over tokens.
"""
