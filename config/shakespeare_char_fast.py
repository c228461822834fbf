# Character-level Shakespeare with techniques that are newer than GPT-2.
# Prepare the data first: python prepare.py
#
# A number beside a setting is how much it lowers the validation loss after the same number of
# steps on a CPU. Seeds differ by 0.01, so smaller differences are not significant. docs/results.md
# has the measurements.

out_dir = "out-shakespeare-char-fast"
dataset = "shakespeare_char"
eval_interval = 180
eval_iters = 55  # on a CPU, 55 batches of 2 cover the whole validation split
log_interval = 10

# Information about the preceding characters, without matrix products.
ngrams = 3  # 0.03 compared with 2
smear = 3  # 0.02

# Distant characters predict little, so attention is limited to a window. A longer context then
# takes no more time, and fewer characters are predicted from a short one: 0.015 compared with full
# attention over contexts of 256 in batches of 8 (mean of six seeds).
block_size = 1024
window = 64

position = "rotary"  # 0.12
tie_weights = False  # neither this nor qk_norm makes a significant difference at this size
qk_norm = True
activation = "swiglu"  # 0.005 compared with relu2

optimizer = "muon"  # 0.05 compared with AdamW at the best of three learning rates
min_lr = 0.0  # 0.02 compared with learning_rate / 10: Muon's updates do not shrink by themselves
warmup_iters = 0  # 100 steps make no difference
weight_decay = 0.3  # 0.01 compared with 0.1; the text is small and read twice or more
train_temperature = 0.8  # models that read a small text several times are overconfident
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0  # the size of Muon's updates does not depend on the gradient's

gradient_accumulation_steps = 1

# For a GPU: 7.5 M parameters and 4,096 characters per step. Trained on a CPU, this model ends at a
# loss of 1.387.
n_layer = 4
n_head = 4
n_embd = 256
batch_size = 4
dropout = 0.1
learning_rate = 6e-3
max_iters = 1800

# 4.1 M parameters, 3.7 M of them in the tables of n-grams, and 2,048 characters per step, for a
# CPU: about a minute on two cores
if device == "cpu":
    n_layer = 2
    n_head = 2
    n_embd = 128
    ngrams = 4  # 0.02 compared with 3
    train_temperature = 0.9  # 0.007
    batch_size = 2
    dropout = 0.0
    learning_rate = 8e-3
    max_iters = 1020
    eval_interval = 60
