# Character-level Shakespeare with techniques that are newer than GPT-2, in one to five minutes on
# two CPU cores. Prepare the data first: python prepare.py
#
# A number beside a setting is how much it lowers the validation loss after the same number of
# steps on a CPU; docs/lab-notebook.md has the measurements. Seeds differ by 0.01.

out_dir = "out-shakespeare-char-fast"
dataset = "shakespeare_char"
log_interval = 10

# Information about the preceding characters, without matrix products.
ngrams = 6  # 0.04 compared with 4 after 300 steps

# Distant characters predict little, so attention is limited to a window, and the context can be
# longer: 0.015 compared with full attention over contexts of 256.
block_size = 1024
window = 64

position = "rotary"  # 0.12
tie_weights = False  # neither this nor qk_norm makes a significant difference at this size
qk_norm = True
activation = "swiglu"  # 0.005 compared with relu2

optimizer = "muon"  # 0.05 compared with AdamW at the best of three learning rates
learning_rate = 6e-3
min_lr = 0.0  # 0.02 compared with learning_rate / 10: Muon's updates do not shrink by themselves
warmup_iters = 0  # 100 steps make no difference
train_temperature = 0.9  # models that read a small text several times are overconfident
beta1 = 0.7
grad_clip = 0.0  # the size of Muon's updates does not depend on the gradient's

batch_size = 4
gradient_accumulation_steps = 1

weight_decay = 1.0  # 0.008 compared with 0.5 after 850 steps

if device == "cpu":  # 5.6 M parameters, 5.0 M of them in the tables of n-grams
    n_layer = 3
    n_head = 2
    n_embd = 128
    ngram_rows = 49_157  # more rows help only shorter runs
    max_iters = 800
    eval_interval = 80  # for each evaluation, 65 MB are written
else:  # 10.1 M parameters
    n_layer = 4
    n_head = 4
    n_embd = 256
    max_iters = 1500
    eval_interval = 150
