# Your own text, of any size. The model, its regularization and the number of steps follow from the
# amount of text and the time, which is unlimited without --minutes:
#
#     python prepare.py --input=FILE_OR_FOLDER --dataset=NAME
#     python train.py config/own_text.py --dataset=NAME --out_dir=out-NAME --minutes=5
#
# shakespeare_char_fast.py explains the techniques. docs/lab-notebook.md has the texts on which the
# formulas were chosen, and others on which they were tested.

import math

from folio.data.dataset import load_dataset
from folio.hardware.device import set_up_machine
from folio.hardware.memory import max_micro_batch

_data = load_dataset(dataset)
_machine = set_up_machine(device, dtype, False)
_train_tokens, _vocab_size = len(_data.train), _data.tokenizer.vocab_size
_relative_size = _train_tokens / 1_003_854  # compared with tiny Shakespeare
_relative_bytes = _data.train_bytes / 1_003_854
_has_large_vocabulary = _vocab_size > 10_000  # such as GPT-2's: several characters per token

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
gradient_accumulation_steps = 1

# A smaller text is read more often and needs more dropout, or the model memorizes it. Tokens that
# occur fewer than 50 times are memorized sooner.
_rarity = 0.5 if _has_large_vocabulary else min(1, _train_tokens / _vocab_size / 50)
_repeats = min(4, max(1, _relative_size**-0.45)) * _rarity
_dropout = round(min(0.3, -0.2 * math.log10(_relative_size)), 3)  # negative for more text

# Tables of n-grams help if most of their rows occur often, and are memorized otherwise.
_has_tables = _vocab_size**2 < _train_tokens / 4

# Parameter counts are for 65 characters. `_passes` is how often the text is read; for tiny
# Shakespeare, 3.88 are 1,900 steps in batches of 2, and 7.34 are 1,800 in batches of 4.
_minutes = minutes or math.inf
_minutes_for_large = 8 * max(1, _relative_bytes) ** 0.75
_is_long_text = _relative_size >= 2
# In float32, the medium model would make too few steps in this time.
_suits_medium = _is_long_text and _has_tables and _machine.dtype == "bfloat16"
batch_size = 4 if _is_long_text else 2
dropout = max(0.0, _dropout)
_max_rows = 32_771
_passes = 8 if _is_long_text else 3.88 * _repeats  # 8: usually more than the time allows
_temperature = 0.9
if device != "cpu" or (_minutes >= _minutes_for_large and _relative_bytes >= 0.5):
    # 8.0 M parameters, or on a GPU one of _larger_models
    n_layer, n_head, n_embd = 4, 4, 256
    _max_ngrams = 3
    batch_size = 4
    dropout = max(0.0, 0.1 + _dropout)
    learning_rate = 6e-3
    _passes = 7.34 * _repeats
    _temperature = 0.8
elif _suits_medium and _minutes >= _minutes_for_large / 2:
    # 11.4 M parameters, 10.0 M of them in tables of n-grams
    n_layer, n_head, n_embd = 3, 3, 192
    _max_ngrams = 6
    _max_rows = 64_997
    learning_rate = 7e-3
else:  # 3.3 M parameters, 2.9 M of them in tables of n-grams
    n_layer, n_head, n_embd = 2, 2, 128
    _max_ngrams = 4
    learning_rate = 8e-3
block_size = 256 if _has_large_vocabulary else 1024
window = 64

# A GPU trains the largest model for which the time suffices for 20 tokens per parameter and the
# text has 10, counting each time that it is read; gpt2_fast.py names the papers. Not measured yet.
_larger_models = (  # layers, heads, width, tokens per step
    (6, 6, 384, 16_384),
    (8, 8, 512, 32_768),
    (12, 6, 768, 65_536),
)
if device != "cpu":
    _flops = 0.2 * _machine.peak_flops * 60 * _minutes  # a fifth of the peak, an estimate
    for _layers, _heads, _width, _step_tokens in _larger_models:
        _parameters = 12 * _layers * _width**2 + _vocab_size * _width  # in matrix products
        _has_time = _flops / (6 * _parameters) >= 20 * _parameters
        if _has_time and _passes * _train_tokens >= 10 * _parameters:
            n_layer, n_head, n_embd = _layers, _heads, _width
            learning_rate = 6e-3 * (256 / _width) ** 0.5
            block_size = 1024
            window = 0  # attention to all tokens is faster on a GPU
            batch_size = min(max_micro_batch(device), _step_tokens // block_size)
            gradient_accumulation_steps = _step_tokens // block_size // batch_size
block_size = min(block_size, max(5, len(_data.val) // 2))  # more than smear and ngrams need

# Models that are trained on more text are less overconfident.
train_temperature = round(min(1.0, max(0.8, _temperature + 0.1 * math.log10(_relative_size))), 3)

if _has_tables:
    ngrams = 2 if _train_tokens < 700_000 else _max_ngrams
    ngram_rows = _max_rows

_evaluations = 5 if _has_large_vocabulary else 10
_tokens_per_step = gradient_accumulation_steps * batch_size * block_size
eval_interval = max(1, round(_passes * _train_tokens / _tokens_per_step / _evaluations))
max_iters = _evaluations * eval_interval
if _has_large_vocabulary or _relative_bytes > 2:  # not all steps may fit into the time
    eval_iters = max(40_000, 4 * _tokens_per_step) // (batch_size * block_size)
