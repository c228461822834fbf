# A model of GPT-2's size on one GPU, with techniques that are newer than GPT-2: 12 layers of width
# 768, as in train_gpt2.py. It works for any corpus of GPT-2's tokens:
#
#     python prepare.py --dataset=fineweb_edu --max_tokens=1000000000
#     python train.py config/gpt2_fast.py --dataset=fineweb_edu --minutes=60
#
# Without --minutes, it makes at most 5,000 steps, fewer for a corpus of less than 650 M tokens.

import math

from folio.data.dataset import load_dataset
from folio.hardware.device import set_up_machine
from folio.hardware.memory import max_micro_batch

_data = load_dataset(dataset)
_train_tokens, _vocab_size = len(_data.train), _data.tokenizer.vocab_size
if _vocab_size != 50_257 or _train_tokens < 10_000_000:  # the model memorizes a shorter text
    raise ValueError(
        "config/gpt2_fast.py needs 10,000,000 tokens and GPT-2's vocabulary of 50,257, but dataset "
        f"{dataset} has {_train_tokens:,} and {_vocab_size:,}: use config/own_text.py, or prepare "
        "a longer text with --tokenizer=gpt2"
    )

out_dir = "out-gpt2-fast"
log_interval = 10

# A number beside a setting is how much it lowers the validation loss of a small model after 60
# steps on a CPU; docs/lab-notebook.md has the measurements. Seeds differ by 0.03.

n_layer = 12
n_head = 6  # heads of 128, which an H100 computes faster than 12 of 64
n_embd = 768
block_size = 1024

position = "rotary"  # 0.17
qk_norm = True  # 0.10
activation = "relu2"  # 0.06
norm = "rmsnorm"  # no difference, but fewer operations
tie_weights = False  # 0.55; 39 M parameters more
ngrams = 2  # 0.05; its 25 M parameters are looked up, which takes little time

optimizer = "muon"  # 1.3 compared with AdamW
momentum_warmup_iters = 300  # 0.06
lr_decay_start = 0.3  # a constant rate, then a linear decay: 0.14 compared with a cosine
min_lr = 0.0
warmup_iters = 0
grad_clip = 0.0  # the size of Muon's updates does not depend on the gradient's

# At most 20 tokens per parameter of GPT-2 (Hoffmann et al. 2022, "Training Compute-Optimal Large
# Language Models"). Reading a text four times is nearly as good as new text (Muennighoff et al.
# 2023, "Scaling Data-Constrained Language Models").
_tokens = min(2.6e9, 4 * _train_tokens)

# The best number of tokens per step grows with that of the run (Bergsma et al. 2025, "Power
# Lines"): 524,288 for 2.6 billion, as in published records, and 131,072 for 0.1 billion.
_run_tokens = _tokens
if minutes:
    _flops = 0.4 * set_up_machine(device, "auto", False).peak_flops  # per second, as measured
    _run_tokens = min(_tokens, 60 * minutes * _flops / 855e6)  # 855e6 for each token
_sequences = 2 ** max(0, round(math.log2(512 * (_run_tokens / 2.6e9) ** 0.383)))  # per step
batch_size = min(_sequences, max_micro_batch(device))
gradient_accumulation_steps = _sequences // batch_size
learning_rate = 5e-3
max_iters = round(_tokens / (_sequences * block_size))
eval_interval = max(1, max_iters // 20)
