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
_has_long_tokens = _size.vocab_size > 10_000  # such as GPT-2's, of four characters on average

out_dir = "out-own-text"
log_interval = 10

smear = 2
position = "rotary"
qk_norm = True
activation = "relu2"
tie_weights = False
# A table of all pairs of characters helps if most pairs occur often, and is memorized otherwise.
bigrams = _size.vocab_size**2 < _size.train_tokens / 4

block_size = min(256 if _has_long_tokens else 1024, max(8, _size.val_tokens // 2))
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
_repeats = min(4, _share**-0.45) / (2 if _has_long_tokens else 1)
_dropout = round(min(0.3, max(0.0, -0.2 * log10(_share))), 3)

# The numbers of parameters are for 65 characters.
if device != "cpu":  # 12.3 M parameters. Not measured yet.
    n_layer = 6
    n_head = 3
    n_embd = 384
    batch_size = 16
    dropout = 0.2 + _dropout
    _passes = 24.5 * _repeats  # over the text
elif minutes < 8 or _share < 0.5:  # 1.0 M parameters
    n_layer = 2
    n_head = 2
    n_embd = 128
    batch_size = 2 if _share < 2 else 4
    dropout = _dropout
    _passes = 3.88 * _repeats
else:  # 4.3 M parameters
    n_layer = 4
    n_head = 4
    n_embd = 256
    batch_size = 4
    dropout = 0.1 + _dropout
    learning_rate = 6e-3
    _passes = 7.4 * _repeats

_tokens_per_step = batch_size * block_size
max_iters = max(8, round(_passes * _size.train_tokens / _tokens_per_step))
eval_interval = max(1, max_iters // 8)
eval_iters = max(1, 112_640 // _tokens_per_step)  # 112,640 tokens of each split, or all of it
