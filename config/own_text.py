# Your own text, of any size. The model, its regularization and the number of steps follow from the
# amount of text, the time, which is unlimited without --minutes, and the speed of the machine:
#
#     python prepare.py --input=FILE_OR_FOLDER --dataset=NAME
#     python train.py config/own_text.py --dataset=NAME --out_dir=out-NAME --minutes=5
#
# shakespeare_char_fast.py explains the techniques. docs/lab-notebook.md has the texts on which the
# formulas were chosen, and others on which they were tested.

import math

from folio.checkpoint.run_dir import RunDir
from folio.data.dataset import load_dataset
from folio.hardware.device import set_up_machine
from folio.hardware.memory import max_micro_batch
from folio.training.model_size import choose_model_size, count_possible_tokens

_data = load_dataset(dataset)
_train_tokens, _vocab_size = len(_data.train), _data.tokenizer.vocab_size
_relative_size = _train_tokens / 1_003_854  # compared with tiny Shakespeare
_minutes = minutes or 24 * 60  # a model that takes more than a day is no default
_flops = set_up_machine(device, dtype, False).peak_flops * 60 * _minutes

if out_dir == "out":  # not set
    out_dir = "out-own-text"
log_interval = 10

smear = 3
position = "rotary"
qk_norm = True
activation = "swiglu"
tie_weights = False

optimizer = "muon"
min_lr = 0.0
warmup_iters = 0
weight_decay = 0.3
beta1 = 0.8
grad_clip = 0.0

_size = choose_model_size(_train_tokens, _data.train_bytes, _vocab_size, _flops)
n_layer, n_head, n_embd = _size.n_layer, _size.n_head, _size.n_embd
_is_small = n_embd == 128
learning_rate = round(8e-3 * (128 / n_embd) ** 0.45, 5)

# Tables of n-grams help if their rows occur often. Larger models read a text more often, and then
# memorize the tables of longer tokens.
_passes_in_time = count_possible_tokens(_size, _vocab_size, _flops) / _train_tokens
ngrams, ngram_rows = 0, 64_997
if _vocab_size**2 < _train_tokens / 4:
    ngrams = 4 if _is_small else 6
    if _train_tokens < 700_000:
        ngrams = 2
    elif _vocab_size > 256:
        ngrams = 3
elif _vocab_size <= 10_000 and _train_tokens >= 12 * ngram_rows:
    ngrams = 3 if _is_small or _passes_in_time < 2 else 0

window = 64 if device == "cpu" else 0  # attention to all tokens is faster on a GPU
block_size = 256 if _vocab_size > 10_000 else 1024
block_size = min(block_size, 64 * max(2, round(_size.step_tokens / 64)))  # a slow machine has fewer
_sequences = max(1, round(_size.step_tokens / 1024))
batch_size = min(max_micro_batch(device), _sequences)
gradient_accumulation_steps = round(_sequences / batch_size)
# If a short validation text limits the context, a step has more sequences, and as many tokens.
_tokens = batch_size * block_size
block_size = min(block_size, max(smear + max(ngrams, 1), len(_data.val) // 2))
batch_size = _tokens // block_size

# A smaller text is read more often and needs more dropout, or the model memorizes it. Tokens that
# occur fewer than 50 times are memorized sooner. `_passes` is how often the text is read; for tiny
# Shakespeare, 3.88 are 1,900 steps. If fewer passes fit into the time, less dropout is needed.
_rarity = 0.5 if _vocab_size > 10_000 else min(1, _train_tokens / _vocab_size / 50)
_repeats = min(4, max(1, _relative_size**-0.45)) * _rarity
_passes = (3.88 if _is_small else 7.34) * _repeats
_dropout = (0 if _is_small else 0.1) - 0.2 * math.log10(_relative_size)
dropout = round(min(0.3, max(0.0, _dropout)) * min(1, _passes_in_time / _passes), 3)
# Models that are trained on more text are less overconfident.
_temperature = (0.9 if _is_small else 0.8) + 0.1 * math.log10(_relative_size)
train_temperature = round(min(1.0, max(0.8, _temperature)), 3)

_evaluations = 10
_tokens_per_step = gradient_accumulation_steps * batch_size * block_size
eval_interval = max(1, round(_passes * _train_tokens / _tokens_per_step / _evaluations))
max_iters = _evaluations * eval_interval
if _vocab_size > 10_000 or _data.train_bytes > 2e6:  # not all steps may fit into the time
    _eval_tokens = min(max(40_000, 4 * _tokens_per_step), _passes_in_time * _train_tokens / 10)
    eval_iters = max(1, int(_eval_tokens / (batch_size * block_size)))

# A resumed run keeps its settings, because the speed would be measured differently.
_can_resume = init_from in ("resume", "auto") and RunDir(out_dir).exists()
_events = RunDir(out_dir).read_events() if _can_resume else []
if _events and _events[0]["event"] == "start":
    _saved = _events[0]["settings"]
    globals().update({name: _saved[name] for name in _saved.keys() & globals().keys()})
