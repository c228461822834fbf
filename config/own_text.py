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

# Less text is read more often, and needs more dropout against memorization. The sizes of models are
# those for 65 characters.
_steps = _share**0.55
_dropout = max(0.0, -0.2 * log10(_share))

if device != "cpu":  # 12.3 M parameters, 16,384 tokens per step. Not measured yet.
    n_layer = 6
    n_head = 3
    n_embd = 384
    batch_size = 16
    max_iters = round(1500 * _steps)
    dropout = min(0.5, 0.2 + _dropout)
elif minutes < 8 or _share < 0.5:  # 1.0 M parameters, 2,048 or 4,096 tokens per step
    n_layer = 2
    n_head = 2
    n_embd = 128
    batch_size = 2 if _share < 2 else 4
    max_iters = round(3800 / batch_size * _steps)
    dropout = min(0.4, _dropout)
else:  # 4.3 M parameters, 4,096 tokens per step
    n_layer = 4
    n_head = 4
    n_embd = 256
    batch_size = 4
    max_iters = round(1800 * _steps)
    dropout = min(0.4, 0.1 + _dropout)
    learning_rate = 6e-3

eval_interval = max(1, max_iters // 8)
eval_iters = 110 // batch_size  # 112,640 tokens of each split, or all of it
