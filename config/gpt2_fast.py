# A model of GPT-2's size on one GPU, with techniques that are newer than GPT-2: 12 layers of width
# 768, as in train_gpt2.py. It works for any corpus of GPT-2's tokens:
#
#     python prepare.py --dataset=fineweb_edu --max_tokens=3e9
#     python train.py config/gpt2_fast.py --dataset=fineweb_edu --minutes=60
#
# Without --minutes, it makes at most 5,000 steps, fewer for a corpus of less than 650 M tokens.

import math

from folio.cli.errors import UserError
from folio.data.dataset import dataset_size
from folio.hardware.device import choose_machine
from folio.hardware.memory import max_micro_batch

_size = dataset_size(dataset)
if _size.vocab_size != 50_257:
    raise UserError(
        f"config/gpt2_fast.py is for GPT-2's 50,257 tokens, but dataset {dataset} has "
        f"{_size.vocab_size:,}: use config/own_text.py, or prepare it with --tokenizer=gpt2"
    )
if _size.train_tokens < 10_000_000:
    raise UserError(
        f"dataset {dataset} has {_size.train_tokens:,} training tokens; config/gpt2_fast.py needs "
        "10,000,000, or its model memorizes them: use config/own_text.py"
    )

out_dir = "out-gpt2-fast"
log_interval = 10

n_layer = 12
n_head = 6  # heads of 128, which an H100 computes faster than 12 of 64
n_embd = 768
block_size = 1024
position = "rotary"
qk_norm = True
activation = "relu2"
norm = "rmsnorm"
tie_weights = False
zero_init = True
ngrams = 2

optimizer = "muon"
momentum_warmup_iters = 300
weight_decay = 0.1
grad_clip = 0.0  # the size of Muon's updates does not depend on the gradient's
warmup_iters = 0
lr_decay_start = 0.3
min_lr = 0.0

# The run reads 2.6 billion tokens, about 20 per parameter (Hoffmann et al. 2022, "Training
# Compute-Optimal Large Language Models"), and a smaller text four times, which is nearly as good as
# new text (Muennighoff et al. 2023, "Scaling Data-Constrained Language Models").
_tokens = min(2.6e9, 4 * _size.train_tokens)

# The best number of tokens per step grows with those of the run (Bergsma et al. 2025, "Power
# Lines"): 0.5 M for 2.6 billion, as in the records for this size, and 131,072 for 100 M.
_run_tokens = _tokens
if minutes:
    _peak = choose_machine(device, "auto", False).peak_flops
    _run_tokens = min(_tokens, 60 * minutes * 0.4 * _peak / 855e6)  # 855e6 FLOPs per token
_sequences = 2 ** round(math.log2(512 * (_run_tokens / 2.6e9) ** 0.383))  # a power of two
batch_size = min(_sequences, max_micro_batch(device))
gradient_accumulation_steps = _sequences // batch_size
learning_rate = 5e-3
max_iters = round(_tokens / (_sequences * block_size))

eval_interval = max(1, max_iters // 20)
