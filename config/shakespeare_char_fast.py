# The same characters as config/shakespeare_char.py, learnt with what has come since GPT-2.
# First: python prepare.py
#
# Figures are of validation loss at the same steps on a CPU; seeds differ by 0.01 (RESULTS.md).

out_dir = "out-shakespeare-char-fast"
dataset = "shakespeare_char"
eval_interval = 500
eval_iters = 55  # of 2 windows on a CPU: the whole of Shakespeare's validation split
log_interval = 10

# What the model knows of neighbours without a single product: pairs of characters have
# embeddings of their own, which buys 0.02, and each is mixed with the two before it, 0.02.
bigrams = True
smear = 2

# Characters further back tell next to nothing, so attention need not see them. Then long contexts
# cost no more than short ones, and fewer characters stand at a beginning, where nothing is known:
# 0.01 beside contexts of 256 in batches of 8.
block_size = 1024
window = 64

position = "rotary"  # 0.12
tie_weights = False  # this and the next three make no difference that is sure at this size
qk_norm = True
activation = "relu2"
zero_init = True

optimizer = "muon"  # 0.05 beside AdamW at its best of three rates
learning_rate = 8e-3
min_lr = 0.0  # 0.02 beside a tenth, since Muon's updates do not shrink by themselves
warmup_iters = 0  # 100 steps of it change nothing
weight_decay = 0.3  # 0.01 beside 0.1: the text is short, and is read four times
beta1 = 0.8
beta2 = 0.95
grad_clip = 0.0  # Muon's updates have one size whatever the gradient's

gradient_accumulation_steps = 1

# 12.3 M parameters and 16,384 characters a step, for a GPU. Not measured yet.
n_layer = 6
n_head = 3
n_embd = 384
batch_size = 16
dropout = 0.2
max_iters = 1500

# Without a GPU: 1.0 M parameters and 2,048 characters a step, a minute and a half on two cores.
if device == "cpu":
    n_layer = 2
    n_head = 2
    n_embd = 128
    batch_size = 2
    dropout = 0.0
    max_iters = 1900
    eval_interval = 950
    print("config/shakespeare_char_fast.py: no GPU in use, so this is the small model for a CPU")
