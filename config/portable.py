# The architecture of Qwen3, which Ollama, LM Studio, llama.cpp, vLLM and transformers have, too.
# Name this file after a preset:
#
#     python train.py config/own_text.py config/portable.py --dataset=NAME --out_dir=out-NAME
#     python -m tools.export --out_dir=out-NAME --to=NAME.gguf
#
# docs/share.md has what it costs.

position = "rotary"
norm = "rmsnorm"
qk_norm = True
activation = "swiglu"
bias = False

smear = 0
ngrams = 0
window = 0

# On a CPU, attention to all tokens of a long context takes long. If you set another --block_size,
# set --batch_size, too: their product is the number of tokens per step.
if device == "cpu":
    _tokens = batch_size * block_size
    block_size = min(block_size, 256)
    batch_size = _tokens // block_size
