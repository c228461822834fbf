# nanoGPT's character-level Shakespeare recipe. Prepare the data first: python prepare.py

out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"
eval_interval = 250
log_interval = 10

# 10.7 M parameters, for a GPU
n_layer = 6
n_head = 6
n_embd = 384
block_size = 256
batch_size = 64
gradient_accumulation_steps = 1
dropout = 0.2

learning_rate = 1e-3  # small models tolerate higher learning rates
max_iters = 5000
warmup_iters = 100
beta2 = 0.99  # a longer average, because a step has few tokens

# 0.8 M parameters, for a CPU, where the large model would take hours
if device == "cpu":
    n_layer = 4
    n_head = 4
    n_embd = 128
    block_size = 64
    batch_size = 12
    dropout = 0.0
    max_iters = 2000
