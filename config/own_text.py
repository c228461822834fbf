# Your own text, of any size. The model, its regularization and the number of steps follow from the
# amount of text and the time:
#
#     python prepare.py --input=FILE_OR_FOLDER --dataset=NAME
#     python train.py config/own_text.py --dataset=NAME --out_dir=out-NAME --minutes=5
#
# config/shakespeare_char_fast.py explains the techniques. RESULTS.md has the texts on which the
# formulas were chosen, and others on which they were tested.

from math import log10

minutes = minutes or 2  # the default, if there is no --minutes; texts of 1 MB or less take less

_size = dataset_size()
_share = _size.train_tokens / 1_003_854  # of the training split of tiny Shakespeare
_few_characters = _size.vocab_size < 1000  # neither GPT-2's tokens nor Chinese

out_dir = "out-own-text"
log_interval = 10

smear = 2
position = "rotary"
qk_norm = True
activation = "relu2"
tie_weights = not _few_characters
# A table of all pairs of characters helps if most pairs occur often, and is memorized otherwise.
bigrams = _size.vocab_size**2 < _size.train_tokens / 4

block_size = 1024
window = 64

optimizer = "muon"
learning_rate = 8e-3
min_lr = 0.0
warmup_iters = 0
weight_decay = 0.3
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0
gradient_accumulation_steps = 1

# Less text is read more often, and needs more dropout against memorization.
max_iters = round(1900 * _share**0.55)
dropout = min(0.4, max(0.0, -0.2 * log10(_share)))

# 1.0 M parameters for 65 characters, and 2,048 tokens per step
n_layer = 2
n_head = 2
n_embd = 128
batch_size = 2

# 12.3 M parameters and 16,384 tokens per step, for a GPU. Not measured yet.
if device != "cpu":
    n_layer = 6
    n_head = 3
    n_embd = 384
    batch_size = 16
    max_iters = round(1500 * _share**0.55)
    dropout = min(0.5, 0.2 + dropout)

eval_interval = max(1, max_iters // 8)
eval_iters = 110 // batch_size  # 112,640 tokens of each split, or all of it
